"""`megavlm plan --cluster`: splits GPUs between trainer and servers, for the least modelled step.

It tries trainer and servers on the same GPUs and on their own, by whole nodes if there is more than
one. For each number of trainer GPUs it tries powers of two for the tensor and expert axes with each
kind of recomputation, and for each number of serving GPUs powers of two for the servers' tensor
parallelism. The recipe's pipeline and context axes are kept: --search varies those.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megavlm.config.schema import Config
from megavlm.families import family
from megavlm.model_config import model_config
from megavlm.models.sizes import EqualRanks
from megavlm.planner.memory import GB, GPU, LEAST_CACHE, server_memory
from megavlm.planner.overview import Load, step_model
from megavlm.planner.rates import LOW_RATES, MEASURED_CARD, NODE
from megavlm.planner.search import (
    Axes,
    Count,
    changes,
    num_experts,
    powers,
    search,
)
from megavlm.planner.serving import ServerModel
from megavlm.planner.work import StepWork

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """A split that fits: GPUs that train and GPUs that serve, overrides of the recipe, modelled
    seconds of a step, the same at the rate of published runs, and bytes of the fullest trainer GPU.
    """

    trainers: int
    serving: int
    colocate: bool
    overrides: list[str]
    seconds: float
    slow: float
    memory: float

    @property
    def title(self) -> str:
        if self.colocate:
            return f"{self.trainers} train and serve in turns"
        return f"{self.trainers} train, {self.serving} serve"

    @property
    def start(self) -> str:
        """Options of the command that starts it."""
        serving = 0 if self.colocate else self.serving
        nodes = (self.trainers + serving) // NODE
        if nodes < 2:
            return "megavlm train RECIPE"
        return f"megavlm launch RECIPE --nodes {nodes} --rollout-nodes {serving // NODE}"


def cluster_plan(
    load: Load, num_gpus: int, gpu: float = GPU, count: Count = lambda done, total: None
) -> str:
    """Return the fastest split of `num_gpus` GPUs of `gpu` bytes and the runner-up, as text.

    Raises ValueError if no split fits, or if the GPUs of several nodes are not whole nodes.
    """
    config = load(*_mode(1, False, num_gpus > NODE))
    hf_config = model_config(config.model.folder)
    found = splits(load, hf_config, num_gpus, gpu, count)
    if not found:
        raise ValueError(
            f"no split of {num_gpus} GPUs of {gpu / GB:.0f} GB has memory for trainer and servers: "
            "take more GPUs, or look for another pipeline with --search"
        )
    lines = [f"{num_gpus} GPUs; modelled with rates of {MEASURED_CARD}"]
    for name, split in zip(("Choice", "Runner-up"), found, strict=False):
        lines += [
            f"{name}: {split.title}: {split.seconds:.1f} to {split.slow:.1f} s a step, "
            f"{split.memory / GB:.0f} GB on the fullest GPU that trains",
            f"  {' '.join((split.start, *split.overrides))}",
        ]
    return "\n".join(lines)


def splits(
    load: Load, hf_config: Any, num_gpus: int, gpu: float, count: Count = lambda done, total: None
) -> list[Split]:
    """Return the fastest split for each number of trainer GPUs, the fastest first."""
    if num_gpus > NODE and num_gpus % NODE:
        raise ValueError(
            f"--cluster={num_gpus} must be a multiple of the {NODE} GPUs of a node, or fit one"
        )
    unit = NODE if num_gpus > NODE else 1
    kinds = [(trainers, False) for trainers in range(unit, num_gpus, unit)]
    kinds.append((num_gpus, True))
    known: dict[tuple[str, ...], list[EqualRanks]] = {}
    found = []
    for number, (trainers, colocate) in enumerate(kinds):
        count(number, len(kinds))
        serving = num_gpus if colocate else num_gpus - trainers
        for servers in _servers(load, hf_config, serving, colocate, num_gpus > NODE, gpu):
            split = _split(load, hf_config, trainers, serving, servers, gpu, known)
            if split is not None:
                found.append(split)
                break
    return sorted(found, key=lambda split: split.seconds)


def _split(
    load: Load,
    hf_config: Any,
    trainers: int,
    serving: int,
    servers: Keys,
    gpu: float,
    known: dict[tuple[str, ...], list[EqualRanks]],
) -> Split | None:
    """Return the split with the fastest trainer, None if none fits. servers: Overrides for them."""

    def given(*keys: str) -> Config:
        return load(*servers, *keys)

    layouts = [*_layouts(given(), hf_config, trainers)]
    found = search(given, hf_config, trainers, gpu, layouts, known=known)
    best = min(found, key=lambda x: x.seconds, default=None)
    if best is None:
        return None
    slow = step_model(best.config, hf_config, trainers, best.memory, LOW_RATES).seconds()["total"]
    rollout = best.config.rollout
    keys = [*changes(given(), best.config), f"rollout.tensor_parallel={rollout.tensor_parallel}"]
    if rollout.mode == "managed":  # else `megavlm launch` sets the others
        keys.append(f"rollout.servers={rollout.servers}")
    if rollout.colocate:
        keys += ["rollout.colocate=true", "rollout.sync=tensor"]
    fullest = best.memory.fullest
    return Split(trainers, serving, rollout.colocate, keys, best.seconds, slow, fullest)


def _layouts(recipe: Config, hf_config: Any, trainers: int) -> Iterator[Axes]:
    """Yield overrides of the tensor and expert axes that a number of GPUs is a multiple of."""
    pipeline = recipe.parallel.pipeline
    for tensor in powers(NODE):
        if trainers % (tensor * pipeline * recipe.parallel.context):
            continue
        for expert in powers(min(num_experts(hf_config), trainers // pipeline)):
            axes = (
                f"parallel.tensor={tensor}",
                f"parallel.sequence={str(tensor > 1).lower()}",
                f"parallel.expert={expert}",
            )
            yield axes, ("parallel.data=null",)


def _servers(
    load: Load, hf_config: Any, serving: int, colocate: bool, nodes: bool, gpu: float
) -> list[Keys]:
    """Return overrides for servers of each size on `serving` GPUs, the fastest first. Their expert
    parallelism stays the recipe's: a rank stores and reads as many bytes with any.
    """
    found = list[tuple[float, Keys]]()
    heads = family(hf_config.model_type).architecture(hf_config)["num_attention_heads"]
    for size in powers(min(NODE, serving)):
        if serving % size or heads % size:
            continue
        count = (NODE if colocate and nodes else serving) // size
        keys = (f"rollout.tensor_parallel={size}", *_mode(count, colocate, nodes))
        try:
            config = load(*keys)
        except ValueError:
            continue  # servers that the recipe does not support
        memory = server_memory(config, hf_config, gpu)
        if memory.cache >= LEAST_CACHE:
            work = StepWork.of(config, hf_config)
            server = ServerModel.of(config, hf_config, memory, work)
            prompts = -(-work.prompts * size // serving)
            found.append((server.rollout_seconds(work, prompts), keys))
    return [keys for _, keys in sorted(found)]


def _mode(count: int, colocate: bool, nodes: bool) -> Keys:
    """Return the overrides that start `count` servers: on the trainer's GPUs, of which each node
    has its own, on other GPUs of the node, or on other nodes.
    """
    if nodes and not colocate:
        urls = ",".join(f"'http://later{number}:1'" for number in range(count))
        managed = "rollout.servers=1", "rollout.colocate=false"
        return (
            *managed,
            "rollout.sync=distributed",
            "rollout.mode=external",
            f"rollout.urls=[{urls}]",
        )
    servers = "rollout.mode=managed", "rollout.urls=[]", f"rollout.servers={count}"
    if colocate:
        return *servers, "rollout.colocate=true", "rollout.sync=tensor"
    return *servers, "rollout.colocate=false"
