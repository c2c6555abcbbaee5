"""Data of a weight update that ranks, coordinator and transports share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megavlm.inference.server_pool.targets import Target
from megavlm.weight_sync.checksums import Expected
from megavlm.weight_sync.sglang_layout import ServerLayout


@dataclass(frozen=True)
class SyncSettings:
    """Settings of a run's weight updates.

    dtype: the servers' type. num_kv_heads, tied_embeddings, linear_rows: of the language model
    (ServerLayout). pause: SGLang's mode of pausing. timeout: seconds for a request to a server.
    bucket_bytes: size of a bucket on a rank that sends, which holds two.
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
    """Attempt to update the servers, the same on every rank.

    targets: servers that take part. layouts: by URL. refitted: URLs of the servers that get every
    tensor; the others get what training can change. compared: URLs of the servers whose checksums
    can be computed here. parameters: by URL, the names of those that a server takes in slices;
    servers that are not in it take whole tensors only. senders: the ranks that send. rendezvous:
    what the other ranks' transports need from rank 0's.
    """

    targets: tuple[Target, ...]
    layouts: Mapping[str, ServerLayout]
    refitted: tuple[str, ...]
    compared: tuple[str, ...]
    parameters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    senders: tuple[int, ...] = (0,)
    rendezvous: Any = None

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(target.url for target in self.targets)


@dataclass(frozen=True)
class TensorBucket:
    """Tensors that are sent together, contiguous or not, under their HF names: whole, but for
    pieces of stacks of experts (`sglang_layout.PIECE`).

    urls: servers that get them. changed: True if training can change them.
    """

    tensors: Sequence[tuple[str, Tensor]]
    urls: tuple[str, ...]
    changed: bool


@dataclass(frozen=True)
class SendReport:
    """Result of one rank's sending in an attempt.

    lost: reasons by URL of the servers that failed. error: why the rank stopped, None if it sent
    everything; is_own_fault: True if no server caused that. changed: checksums that every server
    must have now; rest: those that refitted servers must have besides.
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

    bytes: of tensors that left the sending ranks, to all servers together. tensors: number of HF
    tensors. checked: number of tensors whose checksums were compared, over all ranks of all
    servers. servers: number of servers that have the version now.
    """

    seconds: float
    bytes: int
    tensors: int
    checked: int
    servers: int


def sync_metrics(reports: Sequence[SyncReport]) -> dict[str, float]:
    """Return the metrics of a step's weight updates, none if there was no update."""
    if not reports:
        return {}
    return {
        "sync_bytes": float(sum(report.bytes for report in reports)),
        "sync_tensors": float(sum(report.tensors for report in reports)),
        "sync_checked": float(sum(report.checked for report in reports)),
        "sync_servers": float(reports[-1].servers),
    }
