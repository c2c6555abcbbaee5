"""Data of a weight update, shared by ranks, coordinator and transports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megavlm.inference.server_pool.receivers import Receiver
from megavlm.weight_sync.checksums import Expected
from megavlm.weight_sync.sglang_layout import ServerLayout


@dataclass(frozen=True)
class SyncSettings:
    """Settings of a run's weight updates.

    dtype: The dtype of the servers' weights. num_kv_heads, tied_embeddings, linear_rows: Properties
    of the language model; see ServerLayout. pause: SGLang's pause mode (abort, retract or
    in_place). timeout: Seconds for a request to a server. bucket_bytes: Size of a bucket; a sending
    rank holds two buckets.
    """

    dtype: torch.dtype
    num_kv_heads: int = 1
    tied_embeddings: bool = False
    linear_rows: tuple[int, int] | None = None
    pause: str = "abort"
    timeout: float = 300.0
    bucket_bytes: int = 2**28


@dataclass(frozen=True)
class SyncAttempt:
    """One attempt to update the servers, the same on every rank.

    receivers: Servers that take part. layouts: Server layout by URL. refitted: URLs of the servers
    that get every tensor; the others get only tensors that training can change. compared: URLs of
    the servers whose checksums can be computed here. parameters: Names, by URL, of the parameters
    that a server takes in slices; a server that is missing here takes whole tensors only. senders:
    Trainer ranks that send tensors. rendezvous: Data of rank 0's transport that the other ranks'
    transports need.
    """

    receivers: tuple[Receiver, ...]
    layouts: Mapping[str, ServerLayout]
    refitted: tuple[str, ...]
    compared: tuple[str, ...]
    parameters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    senders: tuple[int, ...] = (0,)
    rendezvous: Any = None

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(receiver.url for receiver in self.receivers)


@dataclass(frozen=True)
class TensorBucket:
    """Tensors that are sent together, contiguous or not, under their HF names. They are whole
    tensors, except that a stack of experts may be split into pieces (`sglang_layout.PIECE`).

    urls: Servers that get the tensors. changed: True if training can change the tensors.
    """

    tensors: Sequence[tuple[str, Tensor]]
    urls: tuple[str, ...]
    changed: bool


@dataclass(frozen=True)
class SendReport:
    """What one rank has sent in an attempt.

    bytes, tensors: Bytes and HF tensors that were sent. changed: Checksums that every server must
    have now. rest: Further checksums that refitted servers must have. lost: Reasons, by URL, of the
    servers that failed. error: Why the rank stopped; None if it sent everything. is_own_fault: True
    if no server caused the error.
    """

    bytes: int
    tensors: int
    changed: Expected
    rest: Expected
    lost: Mapping[str, str]
    error: str | None
    is_own_fault: bool


@dataclass(frozen=True)
class SyncReport:
    """Report of a weight update, the same on every rank.

    bytes: Bytes of tensors that the sending ranks sent, to all servers together. tensors: Number of
    HF tensors. checked: Number of tensors whose checksums were compared, over all ranks of all
    servers. servers: Number of servers that have the version now.
    """

    seconds: float
    bytes: int
    tensors: int
    checked: int
    servers: int


def sync_metrics(reports: Sequence[SyncReport]) -> dict[str, float]:
    """Return the metrics of a step's weight updates; empty if there was no update."""
    if not reports:
        return {}
    return {
        "sync_seconds": sum(report.seconds for report in reports),
        "sync_bytes": float(sum(report.bytes for report in reports)),
        "sync_tensors": float(sum(report.tensors for report in reports)),
        "sync_checked": float(sum(report.checked for report in reports)),
        "sync_servers": float(reports[-1].servers),
    }
