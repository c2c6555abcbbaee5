"""The tables of docs/estimates.md, from the code:

python -m tests.unit.planner.estimates    # prints them, to be pasted
"""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.parallel import platform

platform.install()  # before the first import of megatron-core

from megavlm.models.cost import H100_FLOPS  # noqa: E402
from megavlm.planner.memory import GB  # noqa: E402
from megavlm.planner.rates import H200_RATES, LOW_RATES, NODE, Rates  # noqa: E402
from megavlm.planner.time import StepModel  # noqa: E402
from megavlm.planner.work import StepWork  # noqa: E402
from megavlm.slurm.server_plan import servers_of_nodes  # noqa: E402
from tests.gpu import page, serving  # noqa: E402
from tests.support.releases import released_config  # noqa: E402
from tests.unit.config.test_recipes import RECIPES, URLS  # noqa: E402

TP4 = ("parallel.tensor=4", "parallel.data=1", "recompute.language=none")
START = re.compile(r"# Start: megavlm (train|launch) recipes/(\S+)(.*)")


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a recipe's start line: those that train, those that serve, and the servers."""

    trainers: int
    serving: int
    servers: int
    colocate: bool

    @property
    def name(self) -> str:
        return f"{self.trainers}" if self.colocate else f"{self.trainers} + {self.serving}"


def cluster(recipe: str) -> Cluster:
    """Return the cluster that the first lines of recipes/RECIPE.yaml start it on."""
    path = RECIPES / f"{recipe}.yaml"
    found = START.search(path.read_text())
    assert found and found[2] == f"{recipe}.yaml", f"{path}: no line that starts it"
    config = load(path, URLS if "nodes" in recipe else [])
    rollout = config.rollout
    if found[1] == "train":
        serving = rollout.servers * rollout.tensor_parallel
        return Cluster(config.parallel.num_ranks, serving, rollout.servers, rollout.colocate)
    options = dict(re.findall(r"--([\w-]+) (\d+)", found[3]))
    nodes, serving = int(options["nodes"]), int(options.get("rollout-nodes", 1))
    if rollout.colocate:
        assert serving == 0, f"{path}: --rollout-nodes 0"
        return Cluster(nodes * NODE, 0, rollout.servers * nodes, colocate=True)
    count, span = servers_of_nodes(rollout.tensor_parallel, serving, NODE)
    servers = serving // span * count
    return Cluster((nodes - serving) * NODE, serving * NODE, servers, colocate=False)


@dataclass(frozen=True)
class SetUp:
    """A row: a recipe with overrides on the cluster of its start line."""

    name: str
    recipe: str
    overrides: Sequence[str] = ()

    @property
    def cluster(self) -> Cluster:
        return cluster(f"grpo/{self.recipe}")


SET_UPS = (
    SetUp("7B, TP 2 x DP 2", "qwen2_5_vl_7b_geo3k"),
    SetUp("7B, TP 4", "qwen2_5_vl_7b_geo3k", TP4),
    SetUp("7B, colocated", "qwen2_5_vl_7b_geo3k_colocated"),
    SetUp("30B-A3B", "qwen3_vl_30b_a3b_geo3k_nodes"),
    SetUp("30B-A3B, colocated", "qwen3_vl_30b_a3b_geo3k_colocated"),
    SetUp("72B", "qwen2_5_vl_72b_geo3k_nodes"),
    SetUp("72B, colocated", "qwen2_5_vl_72b_geo3k_colocated"),
    SetUp("235B-A22B", "qwen3_vl_235b_a22b_geo3k_nodes"),
    SetUp("235B-A22B, colocated", "qwen3_vl_235b_a22b_geo3k_colocated"),
    SetUp("Qwen3.5-9B", "qwen3_5_9b_geo3k"),
)
PHASES = (
    "rollout", "vision", "reference", "old log-probs", "update", "sync", "switch", "total"
)  # fmt: skip


def resolved(set_up: SetUp, folder: Path) -> tuple[Config, Any]:
    """Return the configurations of a row's run and model."""
    urls = [f"'http://node{number}:30000'" for number in range(set_up.cluster.servers)]
    given = [f"rollout.urls=[{','.join(urls)}]"] if "nodes" in set_up.recipe else []
    config = load(RECIPES / f"grpo/{set_up.recipe}.yaml", [*given, *set_up.overrides])
    release = Path(config.model.folder).name.removesuffix("-Instruct")
    return config, released_config(release, folder)


def modelled(
    set_up: SetUp, folder: Path, rates: Rates | None = None, step: StepWork | None = None
) -> StepModel:
    cluster = set_up.cluster
    config, hf_config = resolved(set_up, folder)
    return StepModel(config, hf_config, cluster.trainers, cluster.servers, rates, step=step)


def tables(folder: Path) -> list[str]:
    """Return the lines of all tables."""
    times = [["", "GPUs", *PHASES, "slow", "tokens/s"]]
    sizes = [
        ["", "Forward, language", "Tower", "Memory", "Server's weights, cache", "Running", "Sync"]
    ]
    for set_up in SET_UPS:
        model, slow = (modelled(set_up, folder, rates) for rates in (Rates(), LOW_RATES))
        seconds, step = model.seconds(), model.step
        times.append(
            [
                set_up.name,
                set_up.cluster.name,
                *_cells(seconds),
                f"{slow.seconds()['total']:.1f}",
                f"{step.tokens / seconds['total']:,.0f}",
            ]
        )
        server = model.memory.server
        assert server is not None
        most = step.responses * model.prompts_per_server
        sizes.append(
            [
                set_up.name,
                f"{model.forward_flops / 1e15:.1f} PFLOP",
                f"{model.vision_flops / 1e15:.1f} PFLOP",
                f"{model.memory.fullest / GB:.0f} GB",
                f"{server.weights / GB:.1f}, {server.cache / GB:.1f} GB",
                f"{min(most, model.server.max_running(step))} of {most}",
                f"{model.received / GB:.1f} GB in {model.sync_rounds}",
            ]
        )
    rows = times, sizes, stream(folder), published(folder), measured(folder)
    return [line for table in rows for line in (*_table(table), "")]


def _cells(seconds: dict[str, float]) -> list[str]:
    return [f"{seconds[x]:.1f}" if x in seconds else "" for x in PHASES]


def stream(folder: Path) -> list[list[str]]:
    """Return the rows of 7B's steps with and without rollout.streaming, by the mean response."""
    rows = [["", "mean response", "one batch", "overlap", "overlap, 64 in flight", "rollout then"]]
    keys = (), ("rollout.streaming=true",), ("rollout.streaming=true", "rollout.concurrency=64")
    for set_up in SET_UPS[:2]:
        for mean in (1024, 350, 200):
            found = []
            for more in keys:
                given = replace(set_up, overrides=(*set_up.overrides, *more))
                work = replace(StepWork.of(*resolved(given, folder)), response=mean)
                found.append(modelled(given, folder, step=work).seconds())
            totals = [f"{seconds['total']:.1f}" for seconds in found]
            rows.append([set_up.name, f"{mean:,}", *totals, f"{found[-1]['rollout']:.1f}"])
    return rows


def measured(folder: Path) -> list[list[str]]:
    """Return the rows of what one H200 measured (tests/benchmarks/gpu), beside the model."""
    runs = page.read_results()
    rows = [["One H200", "measured", "modelled", "apart"]]

    def add(name: str, unit: str, seen: float, found: float) -> None:
        cells = (f"{x:.3g} {unit}" if x < 1000 else f"{x:,.0f} {unit}" for x in (seen, found))
        rows.append([name, *cells, f"{found / seen - 1:+.0%}"])

    rates = Rates()
    for model in ("7b", "3b"):
        lines = [x for x in runs["a"] if x["part"] == f"figures {model}" and not x["fault"]]
        (size,) = [x for x in lines if x["check"] == "model"]
        name = f"{size['release']}, {size['layers']} layers, {size['tokens']:,} tokens: "
        phases = {x["phase"]: x for x in lines if x["check"] == "phase"}
        for phase in ("vision", "log-probs", "forward and backward"):
            rate = rates.encoder if phase == "vision" else rates.flops
            seconds, mfu = phases[phase]["seconds"], phases[phase]["mfu"]
            add(name + phase, "s", seconds, seconds * mfu * H100_FLOPS / rate)
        peak = phases["forward and backward"]["gigabytes"]
        add(name + "most memory", "GB", peak, page.modelled_bytes(size) / GB)
    (saving,) = [x for x in runs["a"] if str(x.get("saving", "")).startswith("optimizer state")]
    # Of four layers of 3B and its embedding: 12 bytes a parameter, to the host and back.
    moved = 2 * 12 * (4 * 77.1e6 + 311.2e6)
    seconds = saving["on"]["seconds"] - saving["off"]["seconds"]
    add("Optimizer state to the host and back", "s", seconds, moved / rates.host)
    (line,) = [x for x in runs["b"] if x["check"] == "SGLang's benchmark"]
    three = SetUp("", "qwen2_5_vl_3b_geo3k", ("rollout.tensor_parallel=1",))
    server = modelled(three, folder, H200_RATES).server
    step = server.decode_seconds(serving.BATCH, serving.PROMPT + serving.ANSWER / 2)
    name = f"Server of 3B, decoding, {serving.BATCH} responses"
    add(name, "tokens/s", line["tokens_per_second"], serving.BATCH / step)
    return rows


# EasyR1 v0.3.2, assets/baselines.md: 2,000 tokens/s on each of 8 GPUs for 120 s are 750 tokens for
# each of 512 x 5 sequences, of which an image of Geometry3K and its question are about 400.
EASY = StepWork(512, 5, prompt=400, response=350, longest=2048, patches=1336)
EASY_KEYS = (
    "algorithm.prompts_per_step=512", "algorithm.responses_per_prompt=5",
    "algorithm.minibatches=4", "rollout.concurrency=512", "rollout.tensor_parallel=2",
    "rollout.servers=4",
)  # fmt: skip
# verl's issue 7203: 143 tokens/s on each of 8 GPUs for 290 s are 2,073 tokens for each of 32 x 5
# sequences. Its trainer pads them to micro-batches of 4,096 tokens.
VERL = StepWork(32, 5, prompt=400, response=1673, longest=2048, patches=1336)
VERL_KEYS = (
    "algorithm.prompts_per_step=32", "algorithm.responses_per_prompt=5", "algorithm.minibatches=1",
    "parallel.tensor=2", "parallel.data=4", "rollout.tensor_parallel=8", "rollout.colocate=true",
    "rollout.sync=tensor", "rollout.server_args.mem_fraction_static=0.35",
)  # fmt: skip


def published(folder: Path) -> list[list[str]]:
    """Return the rows of published runs, beside the model on their own work."""
    easy = SetUp("", "qwen2_5_vl_7b_geo3k_colocated", EASY_KEYS)
    verl = SetUp("", "qwen3_5_9b_geo3k", VERL_KEYS)
    ours, slow = (modelled(easy, folder, rates, EASY).seconds() for rates in (None, LOW_RATES))
    # Its trainer computes each prompt, and its image, for each response and in each pass.
    alone = replace(EASY, prompts=EASY.prompts * EASY.responses, responses=1)
    sharded = ("parallel.tensor=1", "parallel.sequence=false", "parallel.data=8")
    repeats = SetUp("", easy.recipe, (*EASY_KEYS, *sharded, "recompute.language=full"))
    theirs = modelled(repeats, folder, LOW_RATES, alone).training()
    theirs["old log-probs"], theirs["vision"] = theirs["reference"], 3 * theirs["vision"]
    theirs |= {name: slow[name] for name in ("rollout", "switch")}
    theirs["total"] = sum(theirs.values())
    config, hf_config = resolved(verl, folder)
    nine = StepModel(config, hf_config, 8, 1, step=VERL).seconds()
    seen = {"rollout": 29.0, "reference": 82.0, "old log-probs": 84.0, "update": 91.0, "sync": 3.5}
    return [
        ["", *PHASES],
        ["EasyR1, 7B, 512 x 5, published", *[""] * (len(PHASES) - 1), "120"],
        ["the model, with each prompt computed five times", *_cells(theirs)],
        ["the model, megavlm at the slow rate", *_cells(slow)],
        ["the model, megavlm", *_cells(ours)],
        ["verl, Qwen3.5-9B, 32 x 5, published", *_cells(seen | {"total": 290.0})],
        ["the model, megavlm", *_cells(nine)],
    ]


def _table(rows: list[list[str]]) -> list[str]:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return [
        re.sub(r"\|(  \|)+", lambda x: x[0].replace("  ", " "), f"| {' | '.join(cells)} |")
        for cells in lines
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print("\n".join(tables(Path(name))))
