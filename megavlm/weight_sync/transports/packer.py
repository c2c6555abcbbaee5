"""Packing of this rank's shards into buckets, whole or as changes since the last update."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megavlm.inference.server_support.megavlm_delta import Part, write
from megavlm.inference.server_support.megavlm_weights import checksum, pack
from megavlm.parallel import platform
from megavlm.weight_sync import block_fp8
from megavlm.weight_sync.gather import LocalShard
from megavlm.weight_sync.schedule import Piece, SyncSchedule
from megavlm.weight_sync.transports.store import Fault, Rendezvous

NUMBERS = torch.int16  # as which bytes are compared


class LastSent:
    """Bytes of the buckets that this rank packed in the last attempt, in host memory, by stream and
    round. Whole experts are left out, because servers cannot read them back.
    """

    def __init__(self) -> None:
        self.buckets: dict[tuple[int, int], Tensor] = {}  # int16
        self._schedule: SyncSchedule | None = None

    def begin(self, schedule: SyncSchedule, rendezvous: Rendezvous) -> str | None:
        """Return the attempt whose changes can be sent with this schedule, None if buckets must be
        sent whole. Every rank returns the same.
        """
        base = rendezvous.base if schedule is self._schedule else None
        if base is None:
            self.buckets.clear()
        self._schedule = schedule
        return base

    def keep(self, stream: int, number: int, numbers: Tensor) -> None:
        """Keep a copy of a bucket."""
        key = stream, number
        if key not in self.buckets:
            self.buckets[key] = torch.empty(
                len(numbers), dtype=NUMBERS, pin_memory=platform.has_gpu()
            )
        self.buckets[key].copy_(numbers)


@dataclass
class Packed:
    """What a rank has packed in an attempt.

    sums: Checksums of all buckets by stream. bytes: Bytes to send by stream. changed, compared: How
    many numbers of two bytes have changed since the last attempt, of how many; 0 of 0 if all were
    packed whole.
    """

    sums: dict[int, list[list[int]]] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)
    changed: int = 0
    compared: int = 0


class Packer:
    """Packs buckets of this rank's shards. A shard that several streams need in a round is made
    once, because a merged adapter is computed for it.

    dtype: The dtype that shards are quantised from. last: Buckets of the attempt before; None if no
    changes are ever sent. base: The attempt whose changes are packed; None to pack whole buckets.
    """

    def __init__(
        self,
        shards: Mapping[int, LocalShard],
        dtype: torch.dtype,
        last: LastSent | None = None,
        base: str | None = None,
    ) -> None:
        self._shards, self._dtype = shards, dtype
        self._last, self.is_delta = last, base is not None
        self._made: dict[int, Tensor] = {}
        self._sums: dict[int, list[Tensor]] = defaultdict(list)
        self._packed = Packed(bytes=defaultdict(int))

    def pack(
        self, stream: int, number: int, bucket: Sequence[Piece], buffer: Tensor
    ) -> tuple[Tensor, list[Part] | None]:
        """Pack bucket `number` of a stream. Returns its part of the buffer, and the parts of its
        changes; None for a whole bucket. Raises Fault if there is no memory for it.
        """
        try:
            whole = torch.empty_like(buffer) if self.is_delta else buffer
            self._fill(bucket, whole)
            compared = sum(piece.nbytes for piece in bucket if not piece.whole)
            self._sums[stream].append(checksum(whole[:compared]))
            numbers = whole[: compared // 2 * 2].view(NUMBERS)
            size, parts = size_of(bucket), None
            if self.is_delta:
                assert self._last is not None
                base = self._last.buckets[stream, number]
                parts, changed = write(whole[:size], base, buffer)
                size = sum(part.nbytes for part in parts)
                self._packed.changed += changed
                self._packed.compared += len(base)
            if self._last is not None:
                self._last.keep(stream, number, numbers)
        except RuntimeError as error:
            raise Fault(f"weights could not be packed: {error}", is_own=True) from error
        self._packed.bytes[stream] += size
        return buffer[:size], parts

    def next_round(self) -> None:
        self._made.clear()

    def result(self) -> Packed:
        self._packed.sums = {i: torch.stack(sums).tolist() for i, sums in self._sums.items()}
        return self._packed

    def _fill(self, bucket: Sequence[Piece], buffer: Tensor) -> None:
        parts = []
        for piece in bucket:
            if piece.entry not in self._made:
                self._made[piece.entry] = self._shards[piece.entry]()
            part = self._made[piece.entry].narrow(
                piece.dim, piece.source, piece.length * piece.stride
            )
            if piece.form != "plain":
                quantise = block_fp8.values if piece.form == "values" else block_fp8.scales
                part = quantise(part.to(self._dtype))
            parts.append(part)
        pack(parts, buffer, [piece.dtype for piece in bucket])


def described(part: Tensor, changes: list[Part] | None) -> str:
    """Return the size of a written bucket and the parts of its changes as JSON."""
    return json.dumps([len(part), changes])


def size_of(bucket: Sequence[Piece]) -> int:
    """Return the bytes of a bucket."""
    return sum(piece.nbytes for piece in bucket)
