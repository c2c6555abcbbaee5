"""`megavlm plan --search`: finds layouts of a recipe on a number of GPUs, the fastest first.

It tries powers of two for the tensor axis (within a node), the pipeline, context and expert axes,
with each kind of recomputation. All other keys of the recipe are kept.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.parallel import Parallel
from megavlm.config.schema import Config
from megavlm.families import family
from megavlm.model_config import model_config
from megavlm.models.common.config import ModelOptions
from megavlm.models.sizes import EqualRanks
from megavlm.planner.memory import BUDGET, GB, GPU, RunMemory, server_memory, trainer_ranks
from megavlm.planner.overview import Load, recomputations, recompute_keys, step_model
from megavlm.planner.rates import MEASURED_CARD, NODE
from megavlm.weight_sync.ownership import numel
from megavlm.weight_sync.trainable import trained_entries

SHOWN = 12  # layouts in the table
Count = Callable[[int, int], object]
Axes = tuple[tuple[str, ...], tuple[str, ...]]  # overrides: axes that cut parameters, others


@dataclass(frozen=True)
class Found:
    """A layout that fits: its configuration, modelled seconds of a step, and memory."""

    config: Config
    seconds: float
    memory: RunMemory


def search_plan(
    load: Load,
    world_size: int | None,
    gpu: float = GPU,
    count: Count = lambda done, total: None,
) -> str:
    """Return the fastest layouts that fit, as a table. count: Callback for progress, with the
    number of layouts done and of all layouts.

    Raises ValueError if none fits.
    """
    config = load()
    hf_config = model_config(config.model.folder)
    num_ranks = world_size or config.parallel.num_ranks
    layouts = [*all_layouts(hf_config, num_ranks)]
    found = sorted(search(load, hf_config, num_ranks, gpu, layouts, count), key=lambda x: x.seconds)
    if not found:
        raise ValueError(
            f"no layout of {num_ranks} GPUs of {gpu / GB:.0f} GB has memory for this model: take "
            "more GPUs (--gpus)"
        )
    lines = [
        f"{len(found)} layouts of {num_ranks} GPUs fit; modelled with rates of {MEASURED_CARD}"
    ]
    lines.append(f"{'seconds':>8}{'GB':>6}  overrides of the recipe")
    for x in found[:SHOWN]:
        keys = " ".join(changes(config, x.config)) or "none"
        lines.append(f"{x.seconds:8.1f}{x.memory.fullest / GB:6.0f}  {keys}")
    return "\n".join(lines)


def changes(recipe: Config, other: Config) -> Iterator[str]:
    """Yield the overrides that turn a recipe's layout and recomputation into `other`'s."""
    for section in ("parallel", "recompute"):
        before, after = getattr(recipe, section), getattr(other, section)
        for field in fields(after):
            value = getattr(after, field.name)
            if value != getattr(before, field.name):
                text = f"[{','.join(value)}]" if isinstance(value, tuple) else str(value).lower()
                yield f"{section}.{field.name}={'null' if value is None else text}"


def search(
    load: Load,
    hf_config: Any,
    world_size: int,
    gpu: float,
    layouts: Sequence[Axes],
    count: Count = lambda done, total: None,
    known: dict[tuple[str, ...], list[EqualRanks]] | None = None,
) -> Iterator[Found]:
    """Yield the layouts that fit. known: Parameters of ranks by axes, of any world size, which are
    computed once for all calls that share it.
    """
    recipe = load()
    dense, experts = held_bytes(recipe, hf_config)
    generates = isinstance(recipe.algorithm, PolicyOptimization)
    server = server_memory(recipe, hf_config, gpu) if generates else None
    known = {} if known is None else known
    kinds = [
        [f"{key}={value}" for key, value in recompute_keys(x).items()]
        for x in recomputations(hf_config)
    ]
    for number, (axes, context) in enumerate(layouts):
        count(number, len(layouts))
        for kind in kinds:
            overrides = (*axes, *context, *kind)
            try:
                config = load(*overrides)
                if least_bytes(config.parallel, dense, experts) > BUDGET * gpu:
                    break  # does not fit in any case, so build no model
                if axes not in known:
                    known[axes] = [*trainer_ranks(config, hf_config, world_size)]
                ranks = scaled(known[axes], world_size)
                memory = RunMemory.of(config, hf_config, world_size, gpu, ranks, server)
            except ValueError:
                break  # a layout that the model or the recipe does not support
            if any(memory.problems()):
                continue
            model = step_model(config, hf_config, world_size, memory)
            yield Found(config, model.seconds()["total"], memory)


def scaled(groups: Sequence[EqualRanks], world_size: int) -> list[EqualRanks]:
    """Return the same parameters for another number of data ranks: a group is whole stages."""
    before = groups[-1].ranks.stop
    return [
        EqualRanks(
            range(x.ranks.start * world_size // before, x.ranks.stop * world_size // before),
            x.parameters,
        )
        for x in groups
    ]


def least_bytes(parallel: Parallel, dense: float, experts: float) -> float:
    """Return the bytes of weights and gradients per rank, averaged over the pipeline stages. This
    is a lower bound for the fullest stage. dense, experts: Results of `held_bytes`.
    """
    cut = dense / parallel.tensor + experts / (parallel.expert * parallel.expert_tensor)
    return cut / parallel.pipeline


def held_bytes(config: Config, hf_config: Any) -> tuple[float, float]:
    """Return the bytes of the whole model's weights and gradients: without experts, and of the
    experts.
    """
    options = ModelOptions.from_config(config)
    entries = family(hf_config.model_type).mapping(hf_config)
    trained = () if config.lora.rank else trained_entries(entries, options, None)
    in_fp32 = config.optimizer.megatron_options["grad_reduce_in_fp32"]
    gradient = 4 if in_fp32 else options.dtype.itemsize
    found = {False: 0.0, True: 0.0}
    for index, entry in enumerate(entries):
        each = options.dtype.itemsize + gradient * (index in trained)
        found[entry.expert is not None] += each * numel(entry)
    return found[False], found[True]


def all_layouts(hf_config: Any, world_size: int) -> Iterator[Axes]:
    """Yield overrides of the axes that determine a rank's parameters, and overrides of the context
    axis.
    """
    num_layers = hf_config.text_config.num_hidden_layers
    tensors, pipelines = powers(NODE), powers(num_layers // 2)
    for tensor, pipeline, context in product(tensors, pipelines, (1, 2)):
        if world_size % (tensor * pipeline * context):
            continue
        for expert in powers(min(num_experts(hf_config), world_size // pipeline)):
            axes = (
                f"parallel.tensor={tensor}",
                f"parallel.sequence={str(tensor > 1).lower()}",
                f"parallel.pipeline={pipeline}",
                *_stages(num_layers, pipeline),
                f"parallel.expert={expert}",
            )
            yield axes, (f"parallel.context={context}", "parallel.data=null")


def num_experts(hf_config: Any) -> int:
    """Return the number of a layer's routed experts, 1 for a dense model."""
    architecture = family(hf_config.model_type).architecture(hf_config)
    return int(architecture.get("num_moe_experts", 1))


def _stages(num_layers: int, pipeline: int) -> Iterable[str]:
    """Return overrides that split layers over stages. If the split is not even, the first stage
    (with the tower) and the last get fewer layers.
    """
    first = last = "null"
    if num_layers % pipeline:
        middle = -(-num_layers // pipeline) * (pipeline - 2)
        first = str((num_layers - middle) // 2)
        last = str(num_layers - middle - int(first))
    return (
        "parallel.virtual=1",
        f"parallel.first_stage_layers={first}",
        f"parallel.last_stage_layers={last}",
    )


def powers(most: int) -> list[int]:
    """Return the powers of two up to `most`."""
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
