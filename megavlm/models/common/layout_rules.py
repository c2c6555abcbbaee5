"""Rules for the layouts of a model. They are checked before anything is built, because
megatron-core rejects some wrong layouts by an assertion deep inside, and others not at all.

A model folder is checked by the same rules before a run (`run/checks/layout.py`). Nothing here
imports torch or megatron-core.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megavlm.models.common.config import ModelOptions
    from megavlm.parallel.mesh import Layout

Architecture = Mapping[str, Any]  # a family's `architecture(hf_config)`


def check_model_layout(
    architecture: Architecture,
    layout: "Layout",
    options: "ModelOptions",
    *,
    vocab_size: int,
    recompute_layers: int = 1,
) -> None:
    """Raise ValueError for a layout that the model does not support. The message names the key, its
    value and values that would work.

    recompute_layers: Number of layers between kept inputs with full recomputation.
    """
    _check_tensor(architecture, layout.tensor, vocab_size)
    _check_linear_attention(architecture, layout)
    _check_stages(architecture["num_layers"], layout, options)
    _check_recompute(architecture["num_layers"], layout, options, recompute_layers)
    _check_experts(architecture, layout, options)


def _check_tensor(architecture: Architecture, size: int, vocab_size: int) -> None:
    problem = next(_tensor_problems(architecture, size, vocab_size), None)
    if problem is None:
        return
    sizes = range(1, architecture["num_attention_heads"] + 1)
    fitting = [str(n) for n in sizes if not any(_tensor_problems(architecture, n, vocab_size))]
    raise ValueError(f"{problem}: set parallel.tensor to {_one_of(fitting)}")


def _tensor_problems(architecture: Architecture, size: int, vocab_size: int) -> Iterator[str]:
    heads, groups = architecture["num_attention_heads"], architecture["num_query_groups"]
    counts = {"num_attention_heads": heads}
    if not all(_expert_layers(architecture)):
        counts["intermediate_size"] = architecture["ffn_hidden_size"]
    counts["vocab_size"] = vocab_size
    for name, count in counts.items():
        if count % size:
            yield f"parallel.tensor={size} does not divide the model's {name}={count}"
    if groups % size and size % groups:
        yield (
            f"parallel.tensor={size} neither divides the model's num_key_value_heads={groups} nor "
            "gives each of them equally many ranks"
        )
    # Ranks that share a key-value head gather all rows and cut them evenly, regardless of heads.
    queries = 2 * heads if architecture.get("attention_output_gate") else heads
    rows = (queries + 2 * groups) * architecture["kv_channels"]
    if rows % size:
        yield (
            f"parallel.tensor={size} does not divide the {rows} rows of the model's queries, keys "
            "and values"
        )


def _check_linear_attention(architecture: Architecture, layout: "Layout") -> None:
    """Check that the heads of Gated DeltaNet can be split over the tensor and the context axis. The
    context ranks split heads, too: each computes all tokens of some heads.
    """
    heads, size = architecture.get("linear_num_key_heads", 0), layout.tensor * layout.context
    if heads % size:
        fitting = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"parallel.tensor={layout.tensor} times parallel.context={layout.context} does not "
            f"divide the model's linear_num_key_heads={heads}: set them to numbers whose product "
            f"is {_one_of(fitting)}"
        )


def _check_stages(num_layers: int, layout: "Layout", options: "ModelOptions") -> None:
    """Check that the stages without a given number of layers get equally many, and that the chunks
    of a stage do.
    """
    given = [options.first_stage_layers, options.last_stage_layers]
    if _splits(num_layers, layout, given):
        return
    raise ValueError(
        f"parallel.pipeline={layout.pipeline} with parallel.virtual={layout.virtual}, "
        f"parallel.first_stage_layers={given[0]} and parallel.last_stage_layers={given[1]} "
        f"does not split the model's {num_layers} layers: stages without a number of their own "
        "must have equally many, and each stage a multiple of parallel.virtual"
        f"{_split_that_works(num_layers, layout)}"
    )


def _check_recompute(
    num_layers: int, layout: "Layout", options: "ModelOptions", recompute_layers: int
) -> None:
    """Check that `recompute_layers` divides the layers of each chunk: megatron-core does not
    support a smaller last region.
    """
    given = [options.first_stage_layers, options.last_stage_layers]
    for stage in _per_stage(num_layers, layout, given):
        chunk = stage // layout.virtual
        if chunk % recompute_layers:
            raise ValueError(
                f"recompute.layers={recompute_layers} does not divide the {chunk} layers of a "
                "pipeline stage or chunk of one: set recompute.layers to a number that does"
            )


def _splits(num_layers: int, layout: "Layout", given: list[int | None]) -> bool:
    per_stage = _per_stage(num_layers, layout, given)
    return all(count > 0 and count % layout.virtual == 0 for count in per_stage)


def _per_stage(num_layers: int, layout: "Layout", given: list[int | None]) -> list[int]:
    """Return the distinct numbers of layers per stage, with a 0 if the layers do not divide."""
    named = [count for count in given if count is not None]
    left, others = num_layers - sum(named), layout.pipeline - len(named)
    if others <= 0:
        return named if (left, others) == (0, 0) else [0]
    return [*named, left // others if left % others == 0 else 0]


def _split_that_works(num_layers: int, layout: "Layout") -> str:
    """Describe an even split, or one with fewer layers on the first and the last stage, since these
    also hold the tower, the embedding and the output layer. Returns "" if neither works.
    """
    if _splits(num_layers, layout, [None, None]):
        return "; an even split works"
    stages, virtual = layout.pipeline, layout.virtual
    middle = -(-num_layers // (stages * virtual)) * virtual  # rounded up
    ends = num_layers - middle * (stages - 2)
    first = ends // 2 // virtual * virtual
    if stages < 2 or not _splits(num_layers, layout, [first, ends - first]):
        return ""
    return (
        f"; parallel.first_stage_layers={first} and parallel.last_stage_layers={ends - first} work"
    )


def _check_experts(architecture: Architecture, layout: "Layout", options: "ModelOptions") -> None:
    if "num_moe_experts" not in architecture:
        for axis in ("expert", "expert_tensor"):
            size = getattr(layout, axis)
            if size > 1:
                raise ValueError(
                    f"parallel.{axis}={size} divides experts, but the model has none: set "
                    f"parallel.{axis}=1"
                )
        return
    for axis, name, count in (
        ("expert", "num_experts", architecture["num_moe_experts"]),
        ("expert_tensor", "moe_intermediate_size", architecture["moe_ffn_hidden_size"]),
    ):
        size = getattr(layout, axis)
        if count % size:
            raise ValueError(
                f"parallel.{axis}={size} does not divide the model's {name}={count}: set "
                f"parallel.{axis} to a number that does"
            )
    if layout.tensor > 1 and not options.sequence:
        raise ValueError(
            f"parallel.tensor={layout.tensor} with experts needs sequence parallelism, or every "
            "rank of the tensor axis would send the same tokens to them: set parallel.sequence=true"
        )


def _expert_layers(architecture: Architecture) -> list[int]:
    """Return 1 for each layer with experts, 0 for each dense layer."""
    dense = [0] * architecture["num_layers"]
    layers: list[int] = architecture.get("moe_layer_freq", dense)
    return layers


def _one_of(numbers: list[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} or {numbers[-1]}"
