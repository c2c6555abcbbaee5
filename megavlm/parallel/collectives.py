"""Collectives on Python objects and on measures, over the groups of a mesh."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh

T = TypeVar("T")


def scatter(parts: Sequence[T] | None, mesh: Mesh) -> T:
    """Send each rank its part. The driver passes one part per rank, the others None. Collective."""
    received: list[Any] = [None]
    sent = None if parts is None else list(parts)
    dist.scatter_object_list(received, sent, src=0, group=mesh.objects)
    return received[0]


def broadcast_object(value: T | None, mesh: Mesh) -> T:
    """Return the driver's value on every rank. Collective."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, group=mesh.objects)
    return box[0]


def barrier(mesh: Mesh) -> None:
    """Block until all ranks arrive. Collective."""
    dist.barrier(group=mesh.objects)


def any_rank(flag: bool) -> bool:
    """Return True if the flag is True on any rank. Collective."""
    vote = torch.tensor(float(flag), device=platform.device())
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return vote.item() > 0


def summing(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a collective function that sums a tensor over the ranks of `group`, in place."""

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        if group.size() > 1:
            dist.all_reduce(tensor, group=group)
        return tensor

    return reduce


def reduce_measures(reports: Sequence[dict[str, torch.Tensor]], mesh: Mesh) -> dict[str, float]:
    """Sum measures over packs, data and context ranks; those whose names start with `largest` are
    maxima instead. Reports come from the last pipeline stage; every rank gets the result.
    Collective.
    """
    result = _reduce(reports, mesh.groups.dp_cp) if mesh.is_last_stage else None
    if mesh.layout.pipeline == 1:
        assert result is not None
        return result
    box = [result]
    dist.broadcast_object_list(box, src=mesh.world_size - 1, group=mesh.objects)
    (received,) = box
    assert received is not None, "the last rank is on the last stage"
    return received


def _reduce(
    reports: Sequence[dict[str, torch.Tensor]], group: dist.ProcessGroup
) -> dict[str, float]:
    names = list(reports[0])
    table = torch.stack(
        [torch.stack([report[name].double() for name in names]) for report in reports]
    )
    largest = torch.tensor([name.startswith("largest") for name in names], device=table.device)
    sums, maxima = table.sum(0), table.amax(0)
    dist.all_reduce(sums, group=group)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(names, maxima.where(largest, sums).tolist(), strict=True))
