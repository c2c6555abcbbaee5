"""Linear layer with low-rank adapters: y = base(x) + sum over its parts of scale B A dropout(x).

A part is one projection of the HF model with its own pair (A, B), as in PEFT. A fused layer has
several parts. Their A's are stacked in one matrix, and their B's form one matrix with its rows in
the order of the fused layer, so that two small products serve all parts. Shapes: R is the sum of
the parts' ranks; rows and columns are the dims of the layer's weight on this rank.

Parallelism. A matrix that is not cut is whole on every rank of the group, and so is its gradient:

    rows cut (linear_qkv, linear_fc1)        A is whole, B is cut like the weight
    columns cut (linear_proj, linear_fc2)    A is cut like the weight, B is whole

Only A x, [T, R], is communicated. With sequence parallelism the whole matrix sees a slice of the
tokens, and megatron-core sums its gradient over the tensor axis (`sequence_parallel`). Tokens of
experts are communicated outside of the layer, in the dispatcher, so that the gradient of the whole
matrix is summed in the backward pass.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import (
    _MODEL_PARALLEL_RNG_TRACKER_NAME,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

EXPERT_STREAM = "adapter-expert-rng"  # differs between expert ranks, not between their tensor ranks


@dataclass(frozen=True)
class LoRAPart:
    """One projection of the HF model, with its HF name (`q_proj`).

    rows: Number of rows of its B on this rank.
    rank: Rank of its adapter, 0 for a projection without adapter.
    scale: Factor of B A x.
    """

    name: str
    rows: int
    rank: int
    scale: float


@dataclass(frozen=True)
class Placement:
    """Placement of a layer on the ranks of `group`.

    cut: The dim of each part that the ranks cut. With "fused" they cut the fused rows without
        regard to parts, and every B is whole; this is for more ranks than key-value heads, and for
        parts whose rows have another order than in HF. None means that the layer is replicated.
    sequence: Whether sequence parallelism is used.
    is_expert: Whether `group` is the expert tensor axis.
    """

    cut: Literal["rows", "columns", "fused"] | None
    group: dist.ProcessGroup
    sequence: bool = False
    is_expert: bool = False


class Adapter(Protocol):
    """Adapter of one linear layer: a LoRALinear, or one expert of a GroupedLoRALinear."""

    @property
    def parts(self) -> tuple[LoRAPart, ...]: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def weight(self) -> Tensor: ...
    def pairs(self) -> Iterator[tuple[LoRAPart, Tensor, Tensor]]: ...
    def merged_weight(self) -> Tensor: ...


class LoRALinear(nn.Module):
    """Adapted linear layer that replaces `base`, with the same kind of output: (output, bias) for
    megatron-core's layers, a tensor for an nn.Linear. Its state dicts have the unchanged keys of
    the base, with `lora_A` [R, columns] and `lora_B_<part>` [rows, rank] added.
    """

    base: Any  # a linear layer of megatron-core or of Transformer Engine, or an nn.Linear
    order: Tensor | None

    def __init__(
        self,
        base: Any,
        *,
        name: str,
        parts: Sequence[LoRAPart],
        placement: Placement,
        num_blocks: int = 1,
        order: Tensor | None = None,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Initialise the adapters. A is drawn from `seed` and `name`, so that it is the same with
        every layout; B is zero.

        name: The layer's name in the whole model.
        num_blocks: Number of blocks that each part is cut into in the fused order, in which blocks
            of the parts alternate.
        order: For a layer whose placement is "fused", used instead of num_blocks: the place of each
            fused row among the rows of all parts.
        """
        super().__init__()
        self.base = base
        self.name = name
        self.parts = tuple(parts)
        self.placement = placement
        self.num_blocks = num_blocks
        self.register_buffer("order", order, persistent=False)
        self.dropout = dropout
        self.enabled = True
        self._initialise(seed)
        for key, parameter in self.named_parameters(recurse=False):
            self._mark(parameter, self._cut_dim(key))
        self.register_load_state_dict_pre_hook(_to_base)

    def adapters(self) -> Iterator[tuple[str, "Adapter"]]:
        """Yield the name and adapter of each linear layer in this module."""
        yield self.name, self

    @property
    def lora_B(self) -> dict[str, nn.Parameter]:
        """B [rows, rank] of each adapted part."""
        return {part.name: getattr(self, f"lora_B_{part.name}") for part in self.parts if part.rank}

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def pairs(self) -> Iterator[tuple[LoRAPart, Tensor, Tensor]]:
        """Yield each adapted part with its A [rank, columns] (rows of `lora_A`) and its B
        [rows, rank].
        """
        for part, a in zip(self.parts, self.lora_A.split(self._ranks, -2), strict=True):
            if part.rank:
                yield part, a, self.lora_B[part.name]

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Return this rank's shard of base + scale B A [rows, columns]. It is computed in fp32 and
        rounded once to the base's dtype, without communication.
        """
        up = self._up(self.lora_B, torch.float32)
        return merged(self.weight, self.lora_A, self._my_rows(up) if self._is("fused") else up)

    def forward(self, x: Tensor) -> Any:
        """Map [..., columns] to [..., rows]. Both are cut as in the base layer."""
        has_norm = hasattr(self.base, "return_layernorm_output")
        if has_norm:  # Transformer Engine fuses the norm into the layer: adapters need its output
            self.base.return_layernorm_output = self.enabled
        result = self.base(x)
        if not self.enabled:
            return result
        if not isinstance(result, tuple):
            return self._add(result, x)
        if has_norm and len(result) == 3:
            output, bias, x = result
        elif has_norm:
            (output, x), bias = result
        else:
            output, bias = result
        return self._add(output, x), bias

    def backward_dw(self) -> None:
        self.base.backward_dw()

    def _add(self, output: Tensor, x: Tensor) -> Tensor:
        cut = self.placement.cut
        a, up = self._factors()
        if cut == "fused":
            up = self._my_rows(up)
        # A tower's layer may have zeros after the columns of its input and output (PaddedLinear).
        if columns := x.size(-1) - a.size(-1):
            a = F.pad(a, (0, columns))
        if rows := output.size(-1) - up.size(0):
            up = F.pad(up, (0, 0, 0, rows))
        down = F.linear(self._drop(x), a)
        if cut is not None and not self.placement.is_expert:
            down = self._communicate(down)
        added = torch.addmm(output.flatten(0, -2), down.flatten(0, -2), up.t())
        return added.view_as(output)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return A [R, columns] and scale B [rows, R] of all parts. The gradient of a whole matrix
        is summed over the ranks that cut the layer, unless `_communicate` or megatron-core sums it.
        """
        a, up = self.lora_A, self._up(self.lora_B, self.lora_A.dtype)
        group = self.placement.group
        if self.placement.is_expert and self._is("rows"):
            a = copy_to_tensor_model_parallel_region(a, group=group)
        elif self.placement.is_expert or self._is("fused"):
            up = copy_to_tensor_model_parallel_region(up, group=group)
        return a, up

    def _communicate(self, down: Tensor) -> Tensor:
        """Communicate A x [T, 1, R] from the ranks that compute it to the ranks that apply B."""
        group = self.placement.group
        if self._is("columns"):
            if self.placement.sequence:
                return reduce_scatter_to_sequence_parallel_region(down, group=group)
            return reduce_from_tensor_model_parallel_region(down, group=group)
        if self.placement.sequence:
            return gather_from_sequence_parallel_region(down, group=group)
        return copy_to_tensor_model_parallel_region(down, group=group)

    def _up(self, lora_B: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return scale B of all parts [..., rows, R] in the fused order, given B [..., rows, rank]
        of each adapted part. The entries of a part are zero in the columns of the other parts.
        """
        padded, start, total = [], 0, sum(self._ranks)
        for part in self.parts:
            if part.rank:
                scaled = lora_B[part.name].to(dtype) * part.scale
                padded.append(F.pad(scaled, (start, total - start - part.rank)))
            else:
                padded.append(self.lora_A.new_zeros(part.rows, total, dtype=dtype))
            start += part.rank
        if self.order is not None:
            return torch.cat(padded).index_select(0, self.order)
        blocks = [b.unflatten(-2, (self.num_blocks, -1)) for b in padded]
        return torch.cat(blocks, dim=-2).flatten(-3, -2)

    def _my_rows(self, up: Tensor) -> Tensor:
        return up.chunk(self.placement.group.size())[self.placement.group.rank()]

    def _drop(self, x: Tensor) -> Tensor:
        """Apply dropout, with the same mask on ranks that hold the same x. Recomputation repeats
        the mask, because it restores the streams of megatron-core's tracker.
        """
        if not self.training or self.dropout == 0.0:
            return x
        stream = self._stream
        random = contextlib.nullcontext() if stream is None else get_cuda_rng_tracker().fork(stream)
        with random:
            return F.dropout(x, self.dropout)

    @property
    def _stream(self) -> str | None:
        placement = self.placement
        if placement.cut is None:
            return None  # the tower's ranks see different images
        if placement.is_expert:
            return get_expert_parallel_rng_tracker_name() if self._is("columns") else EXPERT_STREAM
        if placement.sequence or self._is("columns"):
            return _MODEL_PARALLEL_RNG_TRACKER_NAME
        return get_data_parallel_rng_tracker_name()

    def _initialise(self, seed: int) -> None:
        rows = self.weight.size(0) * (self.placement.group.size() if self._is("fused") else 1)
        assert sum(part.rows for part in self.parts) == rows, self.name
        self.lora_A = nn.Parameter(self._drawn_a(self.name, self.weight, seed))
        for part in self.parts:
            if part.rank:
                zeros = self.weight.new_zeros(part.rows, part.rank)
                self.register_parameter(f"lora_B_{part.name}", nn.Parameter(zeros))

    def _drawn_a(self, name: str, weight: Tensor, seed: int) -> Tensor:
        """Return this rank's A [R, columns] of a linear layer, drawn as PEFT does."""
        group = self.placement.group
        columns = weight.size(1) * (group.size() if self._is("columns") else 1)
        whole = torch.cat([_initial_a(part, columns, name, seed) for part in self.parts])
        mine = whole.chunk(group.size(), dim=1)[group.rank()] if self._is("columns") else whole
        return mine.to(weight).contiguous()

    @property
    def _ranks(self) -> list[int]:
        return [part.rank for part in self.parts]

    def _cut_dim(self, key: str) -> int | None:
        """Return the dim, counted from the end, along which ranks cut a parameter."""
        if key == "lora_A":
            return -1 if self._is("columns") else None
        return -2 if self._is("rows") else None

    def _is(self, cut: str) -> bool:
        return self.placement.cut == cut

    def _mark(self, parameter: nn.Parameter, cut_dim: int | None) -> None:
        """Set the attributes with which megatron-core sums the gradient over the right ranks and
        counts it once in the gradient norm.
        """
        is_cut, group = cut_dim is not None, self.placement.group
        if self.placement.is_expert:
            # `allreduce` False: the gradient is reduced over the ranks that hold the same expert.
            # The norm counts "parallel" parameters on every rank, and other parameters only on
            # dense tensor rank 0, which is unrelated to experts.
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.shared = not is_cut and group.rank() > 0  # type: ignore[attr-defined]
        is_parallel = is_cut or self.placement.is_expert
        dim = -1 if cut_dim is None else cut_dim % parameter.ndim
        set_tensor_model_parallel_attributes(parameter, is_parallel, dim, 1)
        summed_in_backward = self._is("fused") and parameter is not self.lora_A
        if self.placement.sequence and not is_cut and not summed_in_backward:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        destination = {} if destination is None else destination
        self.base.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        self._save_to_state_dict(destination, prefix, keep_vars)
        return destination

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        assert metadata is not None
        group = self.placement.group
        base = sharded_state_dict_default(self.base, prefix, sharded_offsets, metadata, group)
        own = dict(self.named_parameters(recurse=False))
        cut_dims = {key: dim % 2 for key in own if (dim := self._cut_dim(key)) is not None}
        adapters = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            cut_dims,
            sharded_offsets,
            tp_group=group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return {**base, **adapters}

    def extra_repr(self) -> str:
        return f"{self.name}, rank={self._ranks}, dropout={self.dropout}"


def merged(weight: Tensor, a: Tensor, up: Tensor) -> Tensor:
    """Return weight [rows, columns] + up [rows, R] x a [R, columns], in fp32 and rounded once."""
    return torch.addmm(weight.float(), up, a.float()).to(weight.dtype)


def is_adapter(key: str) -> bool:
    """Return True if a key of a state dict or a checkpoint names an adapter's tensor."""
    return key.rpartition(".")[2].startswith(("lora_A", "lora_B"))


def stable_seed(label: str) -> int:
    """Return a seed that depends only on the label: it is the same on every rank and in every
    process.
    """
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=7).digest(), "little")


def _to_base(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add `base.` to the base layer's keys of a state dict, as in the module tree."""
    for key in [key for key in state if key.startswith(prefix)]:
        if not is_adapter(key.removeprefix(prefix)):
            state[f"{prefix}base.{key.removeprefix(prefix)}"] = state.pop(key)


def _initial_a(part: LoRAPart, columns: int, name: str, seed: int) -> Tensor:
    """Draw A [rank, columns] as PEFT does."""
    generator = torch.Generator().manual_seed(stable_seed(f"{seed}/{name}/{part.name}"))
    a = torch.empty(part.rank, columns)
    return nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator) if part.rank else a
