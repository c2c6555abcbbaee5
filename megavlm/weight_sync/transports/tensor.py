"""Transport through memory, to servers on the trainer's nodes: shared files on CPUs, CUDA IPC
between GPUs.

A sender has two buffers for each target, which all servers of the target's kind on the node read:
while they read one, it packs the next bucket into the other. Shards that no rank of the node holds
come from a holder elsewhere, once a node, straight into these buffers.

Between GPUs a server's rank reads the buffers on the sender's GPU, so servers must see that GPU.
"""

import json
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.inference.server_support.megavlm_weights import exchange, take, wait_for
from megavlm.parallel import platform
from megavlm.parallel.shared_file import shared_file
from megavlm.weight_sync.schedule import Server, Stream, SyncSchedule
from megavlm.weight_sync.transports.base import Sending
from megavlm.weight_sync.transports.buckets import BucketTransport
from megavlm.weight_sync.transports.packer import Packed, Packer, described, size_of
from megavlm.weight_sync.transports.store import Fault, Rendezvous
from megavlm.weight_sync.update import SyncAttempt


class TensorTransport(BucketTransport):
    traits = TRANSPORT_TRAITS["tensor"]

    def _servers(self, attempt: SyncAttempt) -> list[Server]:
        # A server that the trainer did not start can only be on rank 0's machine.
        return [
            Server(x.url, attempt.layouts[x.url], x.url in attempt.refitted, x.node or 0)
            for x in attempt.receivers
            if x.url in attempt.loading
        ]

    def _send(self, sending: Sending, schedule: SyncSchedule, packer: Packer) -> Packed:
        rendezvous, rank = sending.attempt.rendezvous, dist.get_rank()
        mine = {
            index: stream
            for index, stream in enumerate(schedule.streams)
            if rank in (stream.holder, stream.sender)
        }
        store = self._store.connect("waits", rendezvous)
        fault: Fault | None = None
        with ExitStack() as files:
            buffers = {}
            for index, stream in mine.items():
                if stream.sender == rank:
                    place, buffers[index] = _buffers(stream, files)
                    for reader in range(len(schedule.targets[stream.target].urls)):
                        opened = place if "file" in place else _handle(buffers[index])
                        key = f"{rendezvous.stream(index)}/open/{reader}"
                        store.set(key, json.dumps(opened))
                else:
                    device = platform.device()
                    buffers[index] = torch.empty(2, stream.room, dtype=torch.uint8, device=device)
            handed = [index for index, stream in mine.items() if stream.sender == rank]
            for number in range(schedule.rounds + 2):
                if number >= 2 and fault is None:
                    try:
                        for index in handed:
                            self._wait_for_readers(schedule, rendezvous, index, number - 2, store)
                    except Fault as failure:
                        fault = failure
                if number >= schedule.rounds:
                    continue
                # Ranks that send to each other go on in step, even if a server has failed.
                operations: list[tuple[Any, Tensor, int]] = []
                texts = dict.fromkeys(mine, "")  # the parts of changes, as JSON
                for index, stream in mine.items():
                    if stream.holder == rank:
                        buffer, bucket = buffers[index][number % 2], stream.buckets[number]
                        part, changes = packer.pack(index, number, bucket, buffer)
                        if changes is not None:
                            texts[index] = described(part, changes)
                        if stream.sender != rank:
                            if changes is not None:
                                store.set(rendezvous.changes(index, number), texts[index])
                            operations.append((dist.isend, part, stream.sender))
                for index, stream in mine.items():
                    if stream.holder != rank:
                        size = size_of(stream.buckets[number])
                        if packer.is_delta:
                            texts[index] = take(store, rendezvous.changes(index, number))
                            size = json.loads(texts[index])[0]
                        part = buffers[index][number % 2][:size]
                        operations.append((dist.irecv, part, stream.holder))
                packer.next_round()
                for transfer in exchange(dist.P2POp(*x) for x in operations if len(x[1])):
                    transfer.wait()
                platform.synchronize()  # servers read as soon as they are told
                if fault is None:
                    for index in handed:
                        store.set(f"{rendezvous.stream(index)}/ready/{number}", texts[index])
                self.note_progress()
        if fault is not None:
            raise fault
        return packer.result()

    def _wait_for_readers(
        self,
        schedule: SyncSchedule,
        rendezvous: Rendezvous,
        index: int,
        number: int,
        store: dist.Store,
    ) -> None:
        """Block until all servers have read a bucket. Raises Fault if one has not."""
        urls = schedule.targets[schedule.streams[index].target].urls
        prefix = rendezvous.stream(index)
        keys = [f"{prefix}/read/{number}/{reader}" for reader in range(len(urls))]
        try:
            wait_for(store, keys, rendezvous.fault, self._timeout)
        except RuntimeError as error:
            late = {}
            if not store.check([rendezvous.fault]):
                late = {
                    url: f"{url} did not read its weights for {self._timeout:g} s"
                    for url, key in zip(urls, keys, strict=True)
                    if not store.check([key])
                }
            raise Fault(str(error), late) from error
        for key in (*keys, f"{prefix}/ready/{number}"):
            store.delete_key(key)


def _buffers(stream: Stream, files: ExitStack) -> tuple[dict[str, Any], Tensor]:
    """Return two buffers of a stream [2, bytes], and where readers on a CPU find them."""
    size = 2 * stream.room
    if platform.has_gpu():
        device = platform.device()
        return {}, torch.empty(2, stream.room, dtype=torch.uint8, device=device)
    path = files.enter_context(shared_file(size=size))
    flat = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    return {"file": path, "bytes": stream.room}, flat.view(2, stream.room)


def _handle(buffers: Tensor) -> dict[str, Any]:
    """Return a CUDA IPC handle of the buffers. Each reader needs its own, because a handle counts a
    single one: a shared handle would count as released while some still read.
    """
    device, *values = buffers.untyped_storage()._share_cuda_()
    return {
        # Processes may number devices differently.
        "gpu": platform.device_uuid(device),
        "handle": [[value.hex()] if isinstance(value, bytes) else value for value in values],
        "bytes": buffers.shape[1],
    }
