"""The tables of docs/estimates.md, from the code:

python -m tests.unit.run.estimates    # prints them, to be pasted
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.parallel import platform

platform.install()  # before the first import of megatron-core

from megavlm.run.capacity.memory import GB  # noqa: E402
from megavlm.run.capacity.time import StepModel  # noqa: E402
from tests.support.releases import released_config  # noqa: E402
from tests.unit.config.test_recipes import RECIPES, URLS  # noqa: E402

TP4 = ("parallel.tensor=4", "parallel.data=1", "recompute.language=none")


@dataclass(frozen=True)
class SetUp:
    """A row: a recipe with overrides, its trainer GPUs and its servers."""

    name: str
    recipe: str
    gpus: str
    trainers: int
    servers: int
    overrides: Sequence[str] = ()


SET_UPS = (
    SetUp("7B, TP 2 x DP 2", "qwen2_5_vl_7b_geo3k", "4 + 4", 4, 1),
    SetUp("7B, TP 4", "qwen2_5_vl_7b_geo3k", "4 + 4", 4, 1, TP4),
    SetUp("7B, colocated", "qwen2_5_vl_7b_geo3k_colocated", "8", 8, 4),
    SetUp("30B-A3B", "qwen3_vl_30b_a3b_geo3k_nodes", "16 + 8", 16, 2),
    SetUp("72B", "qwen2_5_vl_72b_geo3k_nodes", "64 + 64", 64, 8),
    SetUp("235B-A22B", "qwen3_vl_235b_a22b_geo3k_nodes", "96 + 32", 96, 4),
)
PHASES = (
    "rollout", "vision", "reference", "old log-probs", "update", "sync", "switch", "total"
)  # fmt: skip


def resolved(set_up: SetUp, folder: Path) -> tuple[Config, Any]:
    """Return the configurations of a row's run and model."""
    urls = URLS if "nodes" in set_up.recipe else []
    config = load(RECIPES / f"grpo/{set_up.recipe}.yaml", [*urls, *set_up.overrides])
    release = Path(config.model.folder).name.removesuffix("-Instruct")
    return config, released_config(release, folder)


def tables(folder: Path) -> list[str]:
    """Return the lines of both tables."""
    times = [["", "GPUs", *PHASES, "tokens/s"]]
    sizes = [["", "Forward, language", "Tower", "Memory", "Server's weights, cache", "Sync"]]
    for set_up in SET_UPS:
        config, hf_config = resolved(set_up, folder)
        model = StepModel(config, hf_config, set_up.trainers, set_up.servers)
        seconds = model.seconds()
        cells = [f"{seconds[x]:.1f}" if x in seconds else "" for x in PHASES]
        times.append(
            [set_up.name, set_up.gpus, *cells, f"{model.step.tokens / seconds['total']:,.0f}"]
        )
        server = model.memory.server
        assert server is not None
        sizes.append(
            [
                set_up.name,
                f"{model.forward_flops / 1e15:.1f} PFLOP",
                f"{model.vision_flops / 1e15:.1f} PFLOP",
                f"{model.memory.fullest / GB:.0f} GB",
                f"{server.weights / GB:.1f}, {server.cache / GB:.1f} GB",
                f"{model.received / GB:.1f} GB",
            ]
        )
    return [*_table(times), "", *_table(sizes)]


def _table(rows: list[list[str]]) -> list[str]:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print("\n".join(tables(Path(name))))
