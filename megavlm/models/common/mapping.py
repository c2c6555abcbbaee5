"""Mapping table between HuggingFace tensors and Megatron tensors: one entry per Megatron tensor.

Import, export, loading and weight sync read the same table. A transform moves numbers and changes
none, works on full tensors, and depends on no model. A shard rule describes how tensor parallelism
cuts the full Megatron tensor.

Shapes: E experts, H hidden size, I an expert's intermediate size.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShardRule:
    """Cut of a tensor along `dim` (None: every rank holds all of it).

    `parts` equal blocks follow each other along `dim`; each is cut by itself, and a rank holds its
    piece of every block. A gated MLP's first linear has two: gate and up. `axis`: the mesh axis
    whose ranks cut it.
    """

    dim: int | None
    parts: int = 1
    axis: Literal["tensor", "expert_tensor"] = "tensor"


REPLICATED = ShardRule(None)
ROWS = ShardRule(0)
COLUMNS = ShardRule(1)
GATED = ShardRule(0, parts=2)
EXPERT_COLUMNS = ShardRule(1, axis="expert_tensor")
EXPERT_GATED = ShardRule(0, parts=2, axis="expert_tensor")


@dataclass(frozen=True)
class Entry:
    """Megatron tensor, by its sharded-state-dict key, and the HF tensors that it is made of.

    `hf` are the names that hub files use, `hf_shapes` the shapes there. With `expert`, the HF
    tensors are stacks over experts and this tensor is made of that row of each: `to_megatron` takes
    rows and `to_hf` returns them. All experts of a layer share the key; their tensors differ by the
    expert's place in the sharded tensor. `transposed`: those rows are [in, out] on the hub, where a
    linear's weight is [out, in]. `dtype`: kept by the model, its checkpoints and servers whatever
    the others' is, None for the others'.
    """

    megatron: str
    hf: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    to_megatron: Callable[[Sequence[Tensor]], Tensor]
    to_hf: Callable[[Tensor], tuple[Tensor, ...]]
    shard: ShardRule
    expert: int | None = None
    transposed: bool = False
    dtype: torch.dtype | None = None

    @property
    def megatron_shape(self) -> Shape:
        """Shape of the full tensor, of one expert's where experts are stacked."""
        shapes = self.hf_shapes if self.expert is None else [shape[1:] for shape in self.hf_shapes]
        return tuple(self.to_megatron([torch.empty(x, device="meta") for x in shapes]).shape)

    @property
    def checkpoint_shape(self) -> Shape:
        """Shape of the tensor under the key in a checkpoint, where experts are stacked."""
        stack = () if self.expert is None else self.hf_shapes[0][:1]
        return (*stack, *self.megatron_shape)


def keeps_order(entry: Entry) -> bool:
    """Return True if the rows of each HF tensor of a dense linear are in order in the Megatron
    tensor; those of others may stand between them.
    """
    rows = [shape[0] for shape in entry.hf_shapes]
    numbers = torch.arange(sum(rows))[:, None]
    fused = entry.to_megatron(numbers.split(rows))[:, 0]
    owner = torch.bucketize(fused, torch.tensor(rows).cumsum(0), right=True)
    return all(bool((fused[owner == part].diff() > 0).all()) for part in range(len(rows)))


def short_name(hf: str) -> str:
    """Return an HF tensor's name as in Qwen2.5-VL's hub files and in SGLang. Qwen3-VL's hub files,
    and transformers 5 in memory, write longer prefixes.
    """
    for long, short in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if hf.startswith(long):
            return short + hf.removeprefix(long)
    return hf


def by_key(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Group entries by key: one each, or one for each expert in order."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.megatron, []).append(entry)
    for key, group in groups.items():
        numbers = [entry.expert for entry in group]
        assert numbers in ([None], [*range(len(group))]), f"{key} has entries of {numbers}"
    return groups


def shard_tensor(entry: Entry, full: Tensor, rank: int, size: int) -> Tensor:
    """Return the piece of the full Megatron tensor that rank `rank` of `size` on the axis holds.

    It is a view of `full` wherever it is one block. Raises ValueError for unequal pieces.
    """
    dim, parts = entry.shard.dim, entry.shard.parts
    if dim is None or size == 1:
        return full
    if full.shape[dim] % (parts * size):
        raise ValueError(
            f"{entry.megatron} has shape {tuple(full.shape)}: dim {dim} cannot be cut into "
            f"{parts * size} equal pieces; choose a parallel.{entry.shard.axis} that divides it."
        )
    pieces = [part.chunk(size, dim)[rank] for part in full.chunk(parts, dim)]
    return pieces[0] if parts == 1 else torch.cat(pieces, dim)


def unshard(entry: Entry, shards: Sequence[Tensor]) -> Tensor:
    """Join every rank's piece, in rank order, into the full Megatron tensor."""
    dim, parts = entry.shard.dim, entry.shard.parts
    if dim is None or len(shards) == 1:
        return shards[0]
    pieces = [shard.chunk(parts, dim) for shard in shards]
    return torch.cat([piece[part] for part in range(parts) for piece in pieces], dim)


def same(
    megatron: str,
    hf: str,
    shape: Shape,
    shard: ShardRule = REPLICATED,
    dtype: torch.dtype | None = None,
) -> Entry:
    """Map a tensor with the same numbers and shape on both sides."""
    return Entry(megatron, (hf,), (shape,), _only, _as_tuple, shard, dtype=dtype)


def flattened(megatron: str, hf: str, shape: Shape) -> Entry:
    """Map a convolution whose stride is its kernel, [out, ...], to a linear [out, prod(...)]."""
    return Entry(megatron, (hf,), (shape,), _flatten, partial(_unflatten, shape), REPLICATED)


def gated(megatron: str, gate: str, up: str, shape: Shape) -> Entry:
    """Map a gated MLP's first linear: gate on top of up, each [ffn, hidden]."""
    return Entry(megatron, (gate, up), (shape, shape), _concat, _halves, GATED)


def expert_gated(
    megatron: str, stack: str, shape: Shape, expert: int, *, transposed: bool
) -> Entry:
    """Map an expert's row of the hub's gate_up_proj to its first linear [2I, H]: gate on top of up.
    `shape`: of the stack, [E, 2I, H], or [E, H, 2I] if it is `transposed`.
    """
    return _expert(megatron, stack, shape, EXPERT_GATED, expert, transposed)


def expert_down(megatron: str, stack: str, shape: Shape, expert: int, *, transposed: bool) -> Entry:
    """Map an expert's row of the hub's down_proj to its second linear [H, I]. `shape`: of the
    stack, [E, H, I], or [E, I, H] if it is `transposed`.
    """
    return _expert(megatron, stack, shape, EXPERT_COLUMNS, expert, transposed)


def _expert(
    megatron: str, stack: str, shape: Shape, shard: ShardRule, expert: int, transposed: bool
) -> Entry:
    there, back = (_transpose, _untranspose) if transposed else (_only, _as_tuple)
    return Entry(megatron, (stack,), (shape,), there, back, shard, expert, transposed)


def fused_qkv(
    megatron: str, names: Sequence[str], shapes: Sequence[Shape], num_groups: int
) -> Entry:
    """Map attention's input linear: for each key-value group its query heads, key head and value
    head.
    """
    heads_per_group = shapes[0][0] // shapes[1][0]
    return Entry(
        megatron,
        tuple(names),
        tuple(shapes),
        partial(_interleave, num_groups),
        partial(_deinterleave, num_groups, heads_per_group),
        ROWS,
    )


def _only(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor


def _as_tuple(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,)


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return _only(tensors).flatten(1)


def _unflatten(shape: Shape, tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor.reshape(shape),)


def _transpose(tensors: Sequence[Tensor]) -> Tensor:
    return _only(tensors).t()


def _untranspose(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor.t(),)


def _concat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


def _halves(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.chunk(2)


def _interleave(num_groups: int, tensors: Sequence[Tensor]) -> Tensor:
    """Fuse q [heads * d, ...], k and v [groups * d, ...] by group, in one
    [groups * (heads / groups + 2) * d, ...].
    """
    return torch.cat([x.reshape(num_groups, -1, *x.shape[1:]) for x in tensors], dim=1).flatten(
        0, 1
    )


def _deinterleave(num_groups: int, heads_per_group: int, fused: Tensor) -> tuple[Tensor, ...]:
    heads = fused.reshape(num_groups, heads_per_group + 2, -1, *fused.shape[1:])
    return tuple(x.flatten(0, 2) for x in heads.split([heads_per_group, 1, 1], dim=1))
