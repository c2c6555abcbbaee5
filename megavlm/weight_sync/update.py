"""Data of a weight update, shared by ranks, coordinator and transports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megavlm.inference.server_pool.receivers import Receiver
from megavlm.weight_sync.sglang_layout import ServerLayout

GPU_PORTION, CPU_PORTION = 2**31, 2**28  # bytes


@dataclass(frozen=True)
class SyncSettings:
    """Settings of a run's weight updates.

    dtype: The dtype of the servers' weights. num_kv_heads, tied_embeddings, linear_rows,
    vision_head_dim, audio_head_dim, server_names: Properties of the model; see ServerLayout.
    pause_mode: SGLang's pause mode (abort, retract or in_place). flush_aborted: True if requests
    are in flight during an update that aborts them. They are sent again before the client knows the
    new version, and would find what the old weights cached under the name of the old version.
    timeout: Seconds for a
    request to a server, and for a bucket. bucket_bytes: Bytes that a rank of a server receives, and
    a rank of the trainer sends, in one bucket; each holds two buckets. The transport through files
    gathers as many on a rank. fp8: True if the weights of language layers are sent in block FP8,
    quantised from `dtype`. delta: True if only the numbers that
    have changed are sent to servers that have the others.
    """

    dtype: torch.dtype
    num_kv_heads: int = 1
    tied_embeddings: bool = False
    linear_rows: tuple[int, int] | None = None
    vision_head_dim: int = 1
    audio_head_dim: int = 1
    server_names: tuple[tuple[str, str], ...] = ()
    pause_mode: str = "abort"
    flush_aborted: bool = False
    timeout: float = 300.0
    bucket_bytes: int = CPU_PORTION
    fp8: bool = False
    delta: bool = False


@dataclass(frozen=True)
class SyncAttempt:
    """One attempt to update the servers, the same on every rank.

    receivers: Servers that take part. layouts: Server layout by URL. loading: URLs of the servers
    that load weights. refitted: URLs of the servers that get every tensor; the others get only
    tensors that training can change. version: Weight version that servers have afterwards.
    rendezvous: Data of rank 0's transport that the other ranks' transports need.
    """

    receivers: tuple[Receiver, ...]
    layouts: Mapping[str, ServerLayout]
    loading: tuple[str, ...]
    refitted: tuple[str, ...]
    version: str
    rendezvous: Any = None

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(receiver.url for receiver in self.receivers)


@dataclass(frozen=True)
class SendReport:
    """What one rank has sent in an attempt.

    bytes, tensors: Bytes and HF tensors that were sent. sums: Checksums, as the transport compares
    them with the servers'. lost: Reasons, by URL, of the servers that failed. error: Why the rank
    stopped; None if it sent everything. is_own_fault: True if no server caused the error. changed,
    compared: How many numbers of two bytes have changed since the last update, of how many; 0 of 0
    if whole buckets were sent.
    """

    bytes: int
    tensors: int
    sums: Any
    lost: Mapping[str, str]
    error: str | None
    is_own_fault: bool
    changed: int = 0
    compared: int = 0


@dataclass(frozen=True)
class SyncReport:
    """Report of a weight update, the same on every rank.

    bytes: Bytes of tensors that the servers received, all together. tensors: Number of HF tensors.
    checked: Number of tensors that were verified, over all ranks of all servers. servers: Number of
    servers that have the version now. density: Share of the numbers of two bytes that have changed
    since the last update; 1 if whole buckets were sent. chain_bytes: Bytes of the chain in the
    store; 0 with another transport.
    """

    seconds: float
    bytes: int
    tensors: int
    checked: int
    servers: int
    density: float = 1.0
    chain_bytes: int = 0


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
        "sync_density": sum(report.density for report in reports) / len(reports),
    } | ({"sync_chain_bytes": float(chain)} if (chain := reports[-1].chain_bytes) else {})
