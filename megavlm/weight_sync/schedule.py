"""Schedule of a weight update: which trainer rank sends which parts of its shards to which ranks of
servers, in which buckets. All functions are pure, and every rank computes the same schedule.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple

import torch

from megavlm.weight_sync.block_fp8 import BLOCK, SCALES, SUFFIX, VALUES, scale_shape
from megavlm.weight_sync.ownership import SyncPlan
from megavlm.weight_sync.runs import Slice, Slices
from megavlm.weight_sync.sglang_layout import ServerLayout, parameter_name


@dataclass(frozen=True)
class Target:
    """Rank `rank` of servers of one layout, which all read the same bytes.

    urls: The servers. node: The trainer node whose memory they can open; None for a server that
    receives over the network, and shares no memory. full: True to send every tensor, and not only
    those that training can change.
    """

    layout: ServerLayout
    rank: int
    full: bool
    node: int | None
    urls: tuple[str, ...]


class Piece(NamedTuple):
    """Part of a trainer rank's shard that goes to one parameter of a target.

    entry: Index of the mapping entry whose shard it is of. source: First row (or column) in the
    shard. name, shape: Parameter of the server. row: Expert in a stack; None for other parameters.
    dim: The dim whose rows are counted. whole: True for an expert that the server's own loader
    takes. start: First row in the parameter. length: Number of rows. dtype: The server's. unit:
    Bytes of a row. form: For a parameter in block FP8, its numbers or its scales, each row of which
    is of BLOCK rows of the shard. target: Index of the target.

    Example, rows 64 to 127 of a shard in bfloat16 with 2,048 columns, which are rows 0 to 63 of a
    server's gate_up_proj [256, 2048]:
        Piece(entry=7, source=64, name="model.layers.0.mlp.gate_up_proj.weight", shape=(256, 2048),
              row=None, dim=0, whole=False, start=0, length=64, dtype=torch.bfloat16, unit=4096,
              form="plain", target=0)  # nbytes: 262144
    """

    entry: int
    source: int
    name: str
    shape: tuple[int, ...]
    row: int | None
    dim: int
    whole: bool
    start: int
    length: int
    dtype: torch.dtype
    unit: int
    form: Literal["plain", "values", "scales"]
    target: int

    @property
    def nbytes(self) -> int:
        return self.length * self.unit

    @property
    def step(self) -> int:
        """Number of rows that stay together."""
        return BLOCK if self.form == "values" else 1

    @property
    def stride(self) -> int:
        """Number of rows of the shard for each row."""
        return BLOCK if self.form == "scales" else 1

    def without(self, rows: int) -> "Piece":
        """Return the piece without its first rows."""
        return self._replace(
            source=self.source + rows * self.stride,
            start=self.start + rows,
            length=self.length - rows,
        )


@dataclass(frozen=True)
class Stream:
    """The bytes that one trainer rank sends to one target.

    Example, 5 GiB from rank 3 to target 0 in rounds of 2 GiB, by rank 8 on the servers' node:
        Stream(holder=3, sender=8, target=0, buckets=three tuples of pieces, 1.67 GiB each)

    holder: Trainer rank whose shards the pieces are of. sender: Trainer rank that hands them to the
    servers: the holder, or a rank on the servers' node to which the holder sends them once.
    buckets: Pieces of each round; all streams have the same number of rounds.
    """

    holder: int
    sender: int
    target: int
    buckets: tuple[tuple[Piece, ...], ...]

    @property
    def room(self) -> int:
        """Bytes of the largest bucket, rounded up to whole words of its checksum."""
        return max(padded(sum(piece.nbytes for piece in bucket)) for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for bucket in self.buckets for piece in bucket)


@dataclass(frozen=True)
class SyncSchedule:
    """Targets and streams of a weight update. rounds: Number of buckets of every stream. tensors:
    Number of HF tensors.
    """

    targets: Sequence[Target] = ()
    streams: Sequence[Stream] = ()
    rounds: int = 0
    tensors: int = 0

    def target(self, url: str, rank: int) -> int:
        """Return the index of the target that contains rank `rank` of a server."""
        return next(i for i, x in enumerate(self.targets) if x.rank == rank and url in x.urls)

    def to(self, url: str, rank: int) -> list[int]:
        """Return the indices of the streams to rank `rank` of a server."""
        target = self.target(url, rank)
        return [index for index, stream in enumerate(self.streams) if stream.target == target]


@dataclass(frozen=True)
class Server:
    """A server as the schedule sees it. full: True if it gets every tensor."""

    url: str
    layout: ServerLayout
    full: bool
    node: int | None = None


def make_schedule(
    plan: SyncPlan, servers: Sequence[Server], dtype: torch.dtype, bucket_bytes: int
) -> SyncSchedule:
    """Return the schedule of an update.

    dtype: The dtype of the servers' weights. bucket_bytes: Bytes that a rank of a server receives,
    and a rank of the trainer sends, in a round.

    The bytes of a shard are balanced over the ranks that hold it. To servers on a trainer node, the
    holders on that node send, so that nothing crosses the network; if it has none, holders
    elsewhere send the bytes once to a rank of the node.
    """
    targets = _targets(servers)
    queues = _pieces(plan, targets, dtype)
    shares: dict[tuple[int, int, int], list[Piece]] = {}
    proxied = Counter[int]()
    trainer = plan.trainer
    for holders, pieces in queues.items():
        # Pieces with the same senders are cut into shares of equal bytes.
        groups: dict[tuple[tuple[int, ...], bool], list[Piece]] = {}
        for piece in pieces:
            node = targets[piece.target].node
            near = tuple(r for r in holders if node is None or trainer.node(r) == node)
            groups.setdefault((near or holders, bool(near)), []).append(piece)
        for (senders, direct), together in groups.items():
            for holder, share in zip(senders, cut(together, len(senders)), strict=True):
                for target, some in groupby(share, key=lambda piece: piece.target):
                    own, sender = [*some], holder
                    if not direct:
                        node = targets[target].node
                        local = [r for r in range(trainer.world_size) if trainer.node(r) == node]
                        sender = min(local, key=lambda rank: proxied[rank])
                        proxied[sender] += _size(own)
                    shares.setdefault((holder, sender, target), []).extend(own)
    received, sent = Counter[int](), Counter[int]()
    for (_, sender, target), pieces in shares.items():
        received[target] += _size(pieces)
        sent[sender] += _size(pieces)
    most = max([*received.values(), *sent.values()], default=0)
    rounds = math.ceil(most / bucket_bytes)
    streams = []
    for (holder, sender, target), pieces in sorted(shares.items(), key=lambda item: item[0]):
        # Pieces of an entry stay together, because its shard is made for each round anew.
        pieces.sort(key=lambda piece: (piece.whole, piece.entry))
        buckets = tuple(tuple(sorted(part, key=_place)) for part in cut(pieces, rounds))
        streams.append(Stream(holder, sender, target, buckets))
    entries = {piece.entry for pieces in queues.values() for piece in pieces}
    names = {name for index in entries for name in plan.entries[index].hf}
    return SyncSchedule(targets, streams, rounds, len(names))


def cut(pieces: Sequence[Piece], parts: int) -> list[list[Piece]]:
    """Cut a sequence of pieces into parts of nearly equal bytes. Pieces are split between rows, and
    each row is in exactly one part. The parts keep the order.

    Example: pieces of 10 and 6 rows of 4 bytes (64 bytes) in 2 parts become [8 rows] and
    [2 rows, 6 rows], 32 bytes each.
    """
    ends = [*accumulate(piece.nbytes for piece in pieces)]
    total = ends[-1] if ends else 0
    places = [(0, 0)]  # where parts begin: a piece, and a row in it
    for number in range(1, parts):
        end = total * number // parts
        index = bisect_right(ends, end)  # the piece that holds byte `end`
        piece = pieces[index]
        # Its rows before byte `end`. FP8 numbers are only cut between blocks of BLOCK rows, because
        # the rows of a block share their scale. If rounding reaches the end of the piece, the next
        # part begins with the next piece.
        row = round((end - ends[index] + piece.nbytes) / (piece.unit * piece.step)) * piece.step
        places.append((index + 1, 0) if row == piece.length else (index, row))
    places.append((len(pieces), 0))
    result = []
    for (first, skipped), (last, row) in pairwise(places):
        # A part has the pieces first to last - 1, `row` rows of piece `last`, and not the `skipped`
        # rows of its first piece, which end the part before. Both ends may be in one piece.
        part = [*pieces[first:last]]
        if row:
            part.append(pieces[last]._replace(length=row))
        if skipped and part:
            rest = part[0].without(skipped)
            part[:1] = [rest] if rest.length else []
        result.append(part)
    return result


def _place(piece: Piece) -> tuple[bool, int]:
    """Return the key by which the pieces of a bucket are sorted. Whole experts come last, because
    checksums leave them out; wide numbers first, so that every piece is aligned.
    """
    return piece.whole, -piece.dtype.itemsize


def padded(num_bytes: int) -> int:
    """Round up to whole words of a checksum."""
    return -(-num_bytes // 8) * 8


def _targets(servers: Sequence[Server]) -> list[Target]:
    """Return the targets. Servers of one kind on one node are read from the same memory."""
    kinds: dict[Server, list[str]] = {}
    for server in servers:
        kind = server if server.node is None else replace(server, url="")
        kinds.setdefault(kind, []).append(server.url)
    return [
        Target(kind.layout, rank, kind.full, kind.node, tuple(urls))
        for kind, urls in kinds.items()
        for rank in range(kind.layout.tensor_parallel)
    ]


def _pieces(
    plan: SyncPlan, targets: Sequence[Target], dtype: torch.dtype
) -> Mapping[tuple[int, ...], list[Piece]]:
    """Return the pieces of all targets by the ranks that hold them."""
    layout = plan.trainer.layout
    slices = Slices(layout.tensor, layout.expert_tensor)
    known: dict[tuple[ServerLayout, int, bool], list[tuple[tuple[int, ...], Piece]]] = {}
    queues: dict[tuple[int, ...], list[Piece]] = {}
    for number, target in enumerate(targets):
        kind = target.layout, target.rank, target.full
        if kind not in known:
            known[kind] = [*_of_kind(plan, slices, *kind, dtype)]
        for holders, piece in known[kind]:
            queues.setdefault(holders, []).append(Piece(*piece[:-1], number))
    return queues


def _of_kind(
    plan: SyncPlan,
    slices: Slices,
    layout: ServerLayout,
    rank: int,
    full: bool,
    dtype: torch.dtype,
) -> "Iterable[tuple[tuple[int, ...], Piece]]":
    groups: dict[tuple[str, int | None], list[int]] = {}
    for index, entry in enumerate(plan.entries):
        groups.setdefault((parameter_name(entry.hf[0]), entry.expert), []).append(index)
    for indices in groups.values():
        if not full and plan.changed.isdisjoint(indices):
            continue
        entries = [plan.entries[index] for index in indices]
        kind = entries[0].sent_dtype or dtype
        for part in slices.of(entries, layout, rank):
            for run in part.runs:
                index = indices[run.part]
                if not full and index not in plan.changed:
                    continue  # another part of a fused parameter
                piece = Piece(
                    index,
                    run.source,
                    part.name,
                    part.shape,
                    part.row,
                    part.dim,
                    part.whole,
                    run.start,
                    run.length,
                    kind,
                    _unit(part, kind),
                    "plain",
                    0,
                )
                for stored in _quantised(piece, part) if layout.is_fp8(part.name) else [piece]:
                    yield plan.holders[index][run.shard], stored


def _quantised(piece: Piece, part: Slice) -> list[Piece]:
    """Return the pieces of the numbers and of the scales of a piece. Raises ValueError if a block
    would have rows of several shards.
    """
    if piece.start % BLOCK or piece.length % BLOCK:
        raise ValueError(
            f"rollout.quantization=fp8 has a scale for {BLOCK} x {BLOCK} weights, but a rank has "
            f"{piece.length} rows of {piece.name}: choose parallel.tensor, parallel.expert_tensor "
            f"and rollout.tensor_parallel such that each rank has a multiple of {BLOCK}, or set "
            "rollout.quantization=null"
        )
    scales = replace(part, name=piece.name + SUFFIX, shape=scale_shape(piece.shape))
    return [
        piece._replace(form="values", dtype=VALUES, unit=_unit(part, VALUES)),
        piece._replace(
            form="scales",
            name=scales.name,
            shape=scales.shape,
            start=piece.start // BLOCK,
            length=piece.length // BLOCK,
            dtype=SCALES,
            unit=_unit(scales, SCALES),
        ),
    ]


def _unit(part: Slice, dtype: torch.dtype) -> int:
    """Return the bytes of a row (or column) of a slice."""
    inner = part.shape if part.row is None else part.shape[1:]
    return math.prod(inner) // inner[part.dim] * dtype.itemsize


def _size(pieces: Iterable[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)
