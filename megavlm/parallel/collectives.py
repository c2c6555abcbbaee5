"""Collectives for bytes, Python objects and measures over the groups of a mesh."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from megavlm.parallel import platform

if TYPE_CHECKING:  # megatron-core, which processes without a model do not import
    from megavlm.parallel.mesh import Mesh

T = TypeVar("T")


def scatter(parts: Sequence[bytes] | None, mesh: "Mesh") -> bytes:
    """Send each data-parallel rank's part to all ranks that share this data rank. Collective.

    parts: One part per data rank on the driver, None on other ranks.

    The driver sends a part at most twice, however many ranks receive it, because each rank that has
    received it forwards it to two others.
    """
    # The ranks of a data rank are a binary tree by their index in `members`: index i receives from
    # (i - 1) // 2 and forwards to 2 i + 1 and 2 i + 2. Of members [4, 5, 6, 7, 8], rank 4 sends to
    # 5 and 6, and 5 to 7 and 8. Index 0 receives from the driver, which is index 0 of data rank 0.
    members = [rank for rank, data in enumerate(mesh.data_ranks) if data == mesh.data_rank]
    index = members.index(mesh.rank)
    sent = []
    if parts is not None:
        part = parts[0]
        for data_rank in range(1, mesh.data_size):
            to = mesh.data_ranks.index(data_rank)  # the first rank of that data rank
            sent.append(_Sent(parts[data_rank], to, mesh.objects))
    else:
        part = receive(members[(index - 1) // 2] if index else 0, mesh.objects)
    for child in members[2 * index + 1 : 2 * index + 3]:
        sent.append(_Sent(part, child, mesh.objects))
    # Nothing deadlocks: a rank only receives from its parent, and every rank starts all its sends
    # before it waits for any.
    for one in sent:
        one.wait()
    return part


def send_each(parts: Mapping[int, bytes], mesh: "Mesh") -> None:
    """Send parts to some ranks. Called on the driver only; each of these ranks calls
    `receive_from_driver`.
    """
    for one in [_Sent(part, rank, mesh.objects) for rank, part in parts.items()]:
        one.wait()


def receive_from_driver(mesh: "Mesh") -> bytes:
    """Receive the part that the driver sends to this rank by `send_each`."""
    return receive(0, mesh.objects)


def send(data: bytes, rank: int, group: dist.ProcessGroup) -> None:
    """Send bytes to a rank, which calls `receive`."""
    _Sent(data, rank, group).wait()


def receive(rank: int, group: dist.ProcessGroup) -> bytes:
    """Receive bytes that a rank sends by `send`."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, rank, group)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, rank, group)
    return data.numpy().tobytes()


class _Sent:
    """An asynchronous send of bytes to a rank: first their number, then the bytes."""

    def __init__(self, data: bytes, rank: int, group: dist.ProcessGroup) -> None:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._tensors = torch.tensor([len(data)]), content  # kept until they are sent
        self._works = [dist.isend(tensor, rank, group) for tensor in self._tensors]

    def wait(self) -> None:
        for work in self._works:
            assert work is not None, "the group has all ranks"
            work.wait()


def broadcast_object(value: T | None, mesh: "Mesh") -> T:
    """Return the driver's value on every rank. Collective."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, group=mesh.objects)
    return box[0]


def barrier(mesh: "Mesh") -> None:
    """Block until all ranks arrive. Collective."""
    dist.barrier(group=mesh.objects)


def any_rank(flag: bool | torch.Tensor) -> bool:
    """Return True if the flag is True on any rank. Collective."""
    vote = torch.as_tensor(flag, dtype=torch.float32, device=platform.device())
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return vote.item() > 0


def summing(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a collective function that sums a tensor over the ranks of `group`, in place."""

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        if group.size() > 1:
            dist.all_reduce(tensor, group=group)
        return tensor

    return reduce


def reduce_measures(reports: Sequence[dict[str, torch.Tensor]], mesh: "Mesh") -> dict[str, float]:
    """Sum measures over packs, data ranks and context ranks. Collective.

    Measures whose names start with `largest` are maxima instead. The reports of the last pipeline
    stage are used, and every rank gets the result.
    """
    return from_last_stage(
        _reduce(reports, mesh.groups.dp_cp) if mesh.is_last_stage else None, mesh
    )


def from_last_stage(value: T | None, mesh: "Mesh") -> T:
    """Return on every rank the value that the ranks of the last pipeline stage have. Collective."""
    box: list[Any] = [value]
    if mesh.layout.pipeline > 1:
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
