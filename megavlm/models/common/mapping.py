"""Mapping table between HuggingFace tensors and Megatron tensors: one entry per Megatron tensor.

Import, export, loading and weight sync read the same table. A transform only moves numbers, works
on full tensors, and does not depend on a model. A shard rule describes how tensor parallelism cuts
the full Megatron tensor.

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
    """Rule that describes how ranks cut a tensor.

    dim: The dim that is cut, None if every rank holds the whole tensor.
    parts: Number of equal blocks along `dim`. Each block is cut separately, and a rank holds its
        piece of every block. The first linear layer of a gated MLP has two: gate and up.
    axis: The mesh axis whose ranks cut the tensor.
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
    """Megatron tensor and the HF tensors that it is made of.

    megatron: Key in the sharded state dict. All experts of a layer share one key.
    hf, hf_shapes: Names and shapes of the HF tensors in hub files.
    to_megatron, to_hf: Transforms of full tensors between the two sides.
    shard: Rule that describes how tensor parallelism cuts the Megatron tensor.
    expert: None for a dense tensor. Otherwise the HF tensors are stacks over experts, and this
        tensor is made of row `expert` of each: `to_megatron` takes these rows, `to_hf` returns
        them. The number is also the expert's place in the sharded tensor.
    transposed: True if the rows of the stacks are [in, out] on the hub, where the weight of a
        linear layer is usually [out, in].
    dtype: Data type of this tensor in the model, its checkpoints and the servers, whatever the
        model's dtype is. None uses the model's dtype.
    server_dtype: Data type of the servers' tensor if it differs from `dtype`.
    frozen: True for a tensor that no training changes. The model holds it as a buffer.
    separate: True if hub files hold the tensors of each expert (`experts.3.gate_proj.weight`), and
        not the stacks that `hf` names. transformers stacks them in memory.
    share: Part of an image's patches that a block of the tower gets, after a merger within it. Of a
        convolution of an audio tower: the number of its outputs per channel for each token.
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
    server_dtype: torch.dtype | None = None
    frozen: bool = False
    separate: bool = False
    share: float = 1.0

    @property
    def sent_dtype(self) -> torch.dtype | None:
        """Data type of the servers' tensor, None for the model's."""
        return self.server_dtype or self.dtype

    @property
    def megatron_shape(self) -> Shape:
        """Shape of the full tensor. If experts are stacked, this is one expert's tensor."""
        shapes = self.hf_shapes if self.expert is None else [shape[1:] for shape in self.hf_shapes]
        return tuple(self.to_megatron([torch.empty(x, device="meta") for x in shapes]).shape)

    @property
    def checkpoint_shape(self) -> Shape:
        """Shape of the tensor under this key in a checkpoint. A checkpoint stacks experts."""
        stack = () if self.expert is None else self.hf_shapes[0][:1]
        return (*stack, *self.megatron_shape)


def keeps_order(entry: Entry) -> bool:
    """Return True if the Megatron tensor of a dense linear layer has the rows of each HF tensor in
    their order. Rows of other HF tensors may be between them.
    """
    rows = [shape[0] for shape in entry.hf_shapes]
    numbers = torch.arange(sum(rows))[:, None]
    fused = entry.to_megatron(numbers.split(rows))[:, 0]
    owner = torch.bucketize(fused, torch.tensor(rows).cumsum(0), right=True)
    return all(bool((fused[owner == part].diff() > 0).all()) for part in range(len(rows)))


# Prefixes of HF tensors in Qwen3-VL's hub files, in transformers 5's models in memory and in files
# of models that have a whole language model inside, and the shorter ones of Qwen2.5-VL's hub files.
_SHORT_PREFIXES = (
    ("model.visual.", "visual."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.merger.", "merger."),
)


# Prefix of the trained model's tensors in folders that hold several models (families.PART).
PART_PREFIX = "thinker."


def short_name(hf: str) -> str:
    """Return an HF tensor's name with a short prefix. It is the same for all forms of hub files and
    for models in memory.
    """
    hf = hf.removeprefix(PART_PREFIX)
    for long, short in _SHORT_PREFIXES:
        if hf.startswith(long):
            return short + hf.removeprefix(long)
    return hf


def by_key(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Group entries by key. A key has one entry, or one entry for each expert, in order."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.megatron, []).append(entry)
    for key, group in groups.items():
        numbers = [entry.expert for entry in group]
        assert numbers in ([None], [*range(len(group))]), f"{key} has entries of {numbers}"
    return groups


def shard_tensor(entry: Entry, full: Tensor, rank: int, size: int) -> Tensor:
    """Return the piece of the full Megatron tensor that rank `rank` of `size` on the axis holds. Of
    a gated [2 I, H] with two ranks, rank 0 holds the first halves of gate and of up: [I, H].

    The piece is a view of `full` if it is one block. Raises ValueError if the tensor cannot be cut
    into equal pieces.
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
    """Join the pieces of all ranks, in rank order, to the full Megatron tensor: two of [I, H] to
    [2 I, H].
    """
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
    """Map a tensor that is the same on both sides."""
    return Entry(megatron, (hf,), (shape,), _only, _as_tuple, shard, dtype=dtype)


def flattened(megatron: str, hf: str, shape: Shape) -> Entry:
    """Map a convolution [out, ...] whose stride equals its kernel size to a linear layer
    [out, prod(...)].
    """
    return Entry(megatron, (hf,), (shape,), _flatten, partial(_unflatten, shape), REPLICATED)


def joined(megatron: str, names: Sequence[str], shape: Shape) -> Entry:
    """Map a tensor whose rows are all rows of the first HF tensor, then of the next, each of
    `shape`.
    """
    count = len(names)
    split = partial(torch.chunk, chunks=count)
    return Entry(megatron, tuple(names), (shape,) * count, _concat, split, REPLICATED)


def gated(megatron: str, gate: str, up: str, shape: Shape) -> Entry:
    """Map the first linear layer of a gated MLP: gate's rows, then up's, each [ffn, hidden]."""
    return Entry(megatron, (gate, up), (shape, shape), _concat, _halves, GATED)


def stacked(
    megatron: str, stack: str, shape: Shape, shard: ShardRule, expert: int, *, transposed: bool
) -> Entry:
    """Map an expert's row of a stack on the hub to a linear layer of the expert. A row of
    gate_up_proj is the first layer [2I, H], with the rows of gate before the rows of up. A row of
    down_proj is the second layer [H, I].

    shape: Shape of the stack, [E, 2I, H] or [E, H, I], with the last two dims exchanged if it is
        `transposed`.
    """
    there, back = (_transpose, _untranspose) if transposed else (_only, _as_tuple)
    return Entry(megatron, (stack,), (shape,), there, back, shard, expert, transposed)


def fused_qkv(
    megatron: str, names: Sequence[str], shapes: Sequence[Shape], num_groups: int
) -> Entry:
    """Map the input linear layer of attention. Its rows are, for each key-value group, the query
    heads, the key head and the value head.
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
    """Fuse q [heads * d, ...], k and v [groups * d, ...] by group. Returns one tensor
    [groups * (heads / groups + 2) * d, ...].
    """
    return torch.cat([x.reshape(num_groups, -1, *x.shape[1:]) for x in tensors], dim=1).flatten(
        0, 1
    )


def _deinterleave(num_groups: int, heads_per_group: int, fused: Tensor) -> tuple[Tensor, ...]:
    heads = fused.reshape(num_groups, heads_per_group + 2, -1, *fused.shape[1:])
    return tuple(x.flatten(0, 2) for x in heads.split([heads_per_group, 1, 1], dim=1))
