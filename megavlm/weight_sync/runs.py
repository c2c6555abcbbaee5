"""Runs of a server's parameters in the trainer's shards: where each row or column that a rank of a
server stores comes from.

Trainer ranks and server ranks cut a tensor along the same dim, and whatever moves numbers between
them moves whole rows or whole columns. So the numbers of the rows (or columns) are sent through the
same functions as tensors are, and show where each of them ends up.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from megavlm.models.common.mapping import Entry, shard_tensor
from megavlm.weight_sync.gather import to_hf
from megavlm.weight_sync.sglang_layout import (
    INPUT_CUT,
    ServerLayout,
    hub_tensors,
    parameter_name,
    server_tensors,
)

_LAYER = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Run:
    """Consecutive rows (or columns) of a trainer's shard that are consecutive in a server's
    parameter, too.

    Example: gate and up have 8 rows each, and two trainer ranks hold [gate 0-3, up 0-3] and
    [gate 4-7, up 4-7]. A server with one rank stores [gate 0-7, up 0-7]: the runs are start 0 from
    shard 0 source 0, start 4 from shard 1 source 0, start 8 from shard 0 source 4, and start 12
    from shard 1 source 4, each of length 4.

    start, source: First row in the parameter, and in the shard. part: Place of the entry among
    those of the parameter. shard: Number of the entry's shard.
    """

    start: int
    part: int
    shard: int
    source: int
    length: int


@dataclass(frozen=True)
class Slice:
    """A parameter of a server's rank, or the tensor of one expert in it, and its runs.

    name, shape: Name and shape of the parameter. row: Row of a stack of experts; None for other
    parameters. dim: The dim of the runs, in the shard and in the parameter (or in its row). whole:
    True for a tensor of HF that the model's own loader must take. Zeros that pad the parameter are
    in no run, because the server has them already.

    Example, the parameter of the example in `Run`, with 4 columns:
        Slice("model.layers.0.mlp.gate_up_proj.weight", (16, 4), row=None, dim=0, whole=False,
              runs=(Run(0, part=0, shard=0, source=0, length=4), ...))
    """

    name: str
    shape: tuple[int, ...]
    row: int | None
    dim: int
    whole: bool
    runs: tuple[Run, ...]


class Slices:
    """Slices of mapping entries for ranks of servers. Layers and experts of one form are traced
    once.

    tensor, expert_tensor: Number of trainer ranks on the axes that shard tensors.
    """

    def __init__(self, tensor: int, expert_tensor: int) -> None:
        self._sizes = {"tensor": tensor, "expert_tensor": expert_tensor}
        self._known: dict[object, list[Slice]] = {}

    def of(self, entries: Sequence[Entry], layout: ServerLayout, rank: int) -> Iterator[Slice]:
        """Yield the slices of some entries for rank `rank` of a server.

        entries: One expert, or all entries whose HF tensors are fused to one parameter.
        """
        expert, layer = entries[0].expert, _LAYER.search(entries[0].hf[0])
        place, first = rank, 0
        if expert is not None:
            count = entries[0].hf_shapes[0][0] // layout.expert_parallel
            place, first = rank % layout.expert_tensor, rank // layout.expert_tensor * count
            if not first <= expert < first + count:
                return
        form = (
            tuple(_of_layer(name, "*") for entry in entries for name in entry.hf),
            tuple((entry.hf_shapes, entry.shard) for entry in entries),
            layout,
            place,
        )
        if form not in self._known:
            same = [entry if expert is None else replace(entry, expert=first) for entry in entries]
            self._known[form] = [*self._trace(same, layout, rank)]
        for known in self._known[form]:
            name = _of_layer(known.name, layer[1]) if layer else known.name
            if expert is None:
                yield replace(known, name=name)
            elif known.row is None:
                yield replace(known, name=_EXPERT.sub(f".experts.{expert}.", name))
            else:
                yield replace(known, name=name, row=expert - first)

    def _trace(self, entries: Sequence[Entry], layout: ServerLayout, rank: int) -> Iterator[Slice]:
        is_expert, shape = entries[0].expert is not None, entries[0].megatron_shape
        dim = entries[0].shard.dim
        if dim is None:
            dim = int(INPUT_CUT.fullmatch(parameter_name(entries[0].hf[0])) is not None)
        tensors: list[tuple[str, Tensor]] = []
        # Part, shard and row in the shard of each number. Numbers begin at 1, because servers pad
        # parameters with zeros: a 0 that arrives in a parameter is padding.
        places: list[tuple[int, int, int]] = [(0, 0, 0)]
        for part, entry in enumerate(entries):
            full, begin = entry.megatron_shape, len(places)
            numbers = torch.arange(begin, begin + full[dim])
            # One row (or column) of numbers stands for the tensor: all that is done to it along
            # its other dims is the same for every row.
            numbers = numbers.view([-1 if axis == dim else 1 for axis in range(len(full))])
            size = 1 if entry.shard.dim is None else self._sizes[entry.shard.axis]
            places += [(0, 0, 0)] * full[dim]
            for shard in range(size):
                rows = _along(shard_tensor(entry, numbers, shard, size), dim)
                for source, number in enumerate(rows.tolist()):
                    places[number] = (part, shard, source)
            if len(entry.hf_shapes[0]) != len(full):  # to_hf reshapes, so it needs every element
                numbers = numbers.expand(full)
            tensors += to_hf([(entry, numbers)])
        # Servers store their experts as one parameter [experts, rows, columns], so that numbers
        # lie along dim + 1. Servers that shuffle this stack take whole experts by their own loader.
        if is_expert and layout.whole_experts:
            stored = [*hub_tensors(tensors)]
        else:
            stored = [*server_tensors(dict(tensors), layout, rank)]
        is_stack = is_expert and not layout.whole_experts
        for name, tensor in stored:
            numbers = _along(tensor, dim + is_stack)
            inner = [*(shape if is_expert else entries[0].hf_shapes[0])]
            inner[dim] = len(numbers)
            if is_stack:
                inner = [entries[0].hf_shapes[0][0] // layout.expert_parallel, *inner]
            runs = tuple(_runs(numbers.tolist(), places))
            name = name.partition("[")[0]
            row, whole = 0 if is_stack else None, is_expert and not is_stack
            yield Slice(name, tuple(inner), row, dim, whole, runs)


def _runs(numbers: Sequence[int], places: Sequence[tuple[int, int, int]]) -> Iterator[Run]:
    """Yield the runs of a parameter's rows.

    numbers: Numbers of the rows; 0 for padding. places: Part, shard and row in the shard of each
    number.
    """
    start = 0
    for end in range(1, len(numbers) + 1):
        part, shard, source = places[numbers[start]]
        length = end - start
        if end == len(numbers) or (
            places[numbers[end]] != (part, shard, source + length)
            or (numbers[end] > 0) != (numbers[start] > 0)
        ):
            if numbers[start]:
                yield Run(start, part, shard, source, length)
            start = end


def _along(tensor: Tensor, dim: int) -> Tensor:
    """Return the numbers along `dim` of a tensor that is constant along its other dims."""
    return tensor.movedim(dim, 0).flatten(1)[:, 0] if tensor.dim() > 1 else tensor


@lru_cache(2**16)
def _of_layer(name: str, number: str) -> str:
    """Return the name of the same tensor of another layer."""
    return _LAYER.sub(f".{number}.", name, count=1)
