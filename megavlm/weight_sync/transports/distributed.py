"""Transport by NCCL or gloo: one process group of all sending ranks and all ranks of the servers,
in which every rank sends its buckets point to point.

The group is kept until its members change, or one of them fails or restarts.
"""

import hashlib
import secrets
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.inference.server_support.megavlm_weights import exchange, join, leave, meet
from megavlm.parallel import platform
from megavlm.parallel.watchdog import SERVERS_GROUP
from megavlm.weight_sync.schedule import Server, SyncSchedule
from megavlm.weight_sync.transports.base import Sending
from megavlm.weight_sync.transports.buckets import BucketTransport
from megavlm.weight_sync.transports.packer import Packed, Packer, described
from megavlm.weight_sync.update import SyncAttempt


class DistributedTransport(BucketTransport):
    traits = TRANSPORT_TRAITS["distributed"]

    def __init__(self, *, timeout: float = 300.0) -> None:
        super().__init__(timeout=timeout)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._token = ""  # on rank 0; begins the names of groups that can be used again

    def _servers(self, attempt: SyncAttempt) -> list[Server]:
        return [
            Server(url, attempt.layouts[url], url in attempt.refitted) for url in attempt.loading
        ]

    def _group_name(self, attempt: SyncAttempt) -> str:
        # A server that needs all tensors may have restarted since it joined a group.
        if not self._token or any(x.needs_all for x in attempt.receivers):
            self._token = f"megavlm_{secrets.token_hex(4)}"
        return self._token

    def _group(self, schedule: SyncSchedule, url: str, rank: int, token: str) -> Any:
        senders, readers = members(schedule)
        if (url, rank) not in readers:
            return None  # nothing is sent to it
        return (
            name_of(token, senders, readers),
            len(senders) + readers.index((url, rank)),
            len(senders) + len(readers),
            platform.backend(),
            [senders.index(schedule.streams[index].sender) for index in schedule.to(url, rank)],
        )

    def _send(self, sending: Sending, schedule: SyncSchedule, packer: Packer) -> Packed:
        rendezvous, rank = sending.attempt.rendezvous, dist.get_rank()
        senders, readers = members(schedule)
        device, name = platform.device(), name_of(rendezvous.group, senders, readers)
        store = self._store.connect("waits", rendezvous)
        if name not in self._groups:
            self._leave()
            size, limit = len(senders) + len(readers), timedelta(seconds=self._timeout)
            backend, place = platform.backend(), senders.index(rank)
            self._groups[name] = join(store, name, place, size, backend, limit, SERVERS_GROUP)
            meet(self._groups[name], device)
        group = self._groups[name]
        streams = {i: x for i, x in enumerate(schedule.streams) if x.sender == rank}
        buffers = {
            index: torch.empty(2, stream.room, dtype=torch.uint8, device=device)
            for index, stream in streams.items()
        }
        places = {
            index: len(senders) + readers.index((target.urls[0], target.rank))
            for index, stream in streams.items()
            for target in (schedule.targets[stream.target],)
        }
        works: dict[int, list[Any]] = {}
        for number in range(schedule.rounds):
            for work in works.pop(number - 2, ()):
                work.wait()  # its buffers are used again
            parts = []
            for index, stream in streams.items():
                bucket, buffer = stream.buckets[number], buffers[index][number % 2]
                part, changes = packer.pack(index, number, bucket, buffer)
                parts.append((part, index))
                if changes is not None:
                    store.set(rendezvous.changes(index, number), described(part, changes))
            packer.next_round()
            works[number] = exchange(
                dist.P2POp(dist.isend, part, group=group, group_peer=places[index])
                for part, index in parts
                if len(part)
            )
            self.note_progress()
        for started in works.values():
            for work in started:
                work.wait()
        platform.synchronize()
        return packer.result()

    def close(self) -> None:
        self._leave()

    def _abort(self, work: "Future[Packed]") -> None:
        """Leave the group. A thread that still waits in it, or on its connection, ends at its
        timeout.
        """
        self._token = ""
        self._store.drop("waits")
        self._leave()

    def _leave(self) -> None:
        for name in [*self._groups]:
            leave(self._groups.pop(name))


def members(schedule: SyncSchedule) -> tuple[list[int], list[tuple[str, int]]]:
    """Return the trainer ranks and the ranks of servers in the process group, in its order."""
    senders = sorted({stream.sender for stream in schedule.streams})
    targets = sorted({stream.target for stream in schedule.streams})
    readers = [(schedule.targets[x].urls[0], schedule.targets[x].rank) for x in targets]
    return senders, readers


def name_of(token: str, senders: list[int], readers: list[tuple[str, int]]) -> str:
    """Return the name of the process group of these members."""
    return f"{token}_{hashlib.sha256(repr((senders, readers)).encode()).hexdigest()[:8]}"
