"""One push of the trainer's weights to the servers, versioned and verified."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from megavlm.inference.errors import RolloutServerError, WeightSyncError
from megavlm.inference.server_pool.targets import Targets
from megavlm.weight_sync.coordinator import Round, Sent, SyncCoordinator
from megavlm.weight_sync.gather import gather
from megavlm.weight_sync.lora import Adapters
from megavlm.weight_sync.plan import Plan
from megavlm.weight_sync.sender import Sender, Turn
from megavlm.weight_sync.server_api import control_client
from megavlm.weight_sync.shards import local_shards
from megavlm.weight_sync.transports.base import Transport

BUCKET_BYTES = 2**28
T = TypeVar("T")


@dataclass(frozen=True)
class SyncReport:
    """A push, the same on every rank.

    bytes: of tensors, that left the ranks that send, to all servers together. tensors: HF tensors.
    checked: tensors whose checksums were compared, of all ranks of all servers. servers: that have
    the version now.
    """

    seconds: float
    bytes: int
    tensors: int
    checked: int
    servers: int


def measures(reports: Sequence[SyncReport]) -> dict[str, float]:
    """Of a step's pushes together, under their names in metrics.jsonl; none of no push."""
    if not reports:
        return {}
    return {
        "sync_bytes": float(sum(report.bytes for report in reports)),
        "sync_tensors": float(sum(report.tensors for report in reports)),
        "sync_checked": float(sum(report.checked for report in reports)),
        "sync_servers": float(reports[-1].servers),
    }


class WeightSync:
    """Pushes a model's weights to servers. Made by all trainer ranks together.

    chunks: this rank's part of the model. targets: on global rank 0, None elsewhere. transport: one
    of its own on each rank. dtype: what the servers hold. num_kv_heads, tied_embeddings: of the
    language model. adapters: where they are sent as such; training then changes nothing in `plan`,
    and requests must name `adapter_name(version)`. pause: SGLang's mode of pausing. timeout:
    seconds for a request to a server. objects: a gloo group over all ranks; None is the default
    group. bucket_bytes: what whole tensors may take on a rank that sends, and as much again on
    their way.
    `version` is that of the last push that succeeded, None before the first.
    """

    def __init__(
        self,
        plan: Plan,
        chunks: Sequence[MegatronModule],
        *,
        targets: Targets | None,
        transport: Transport,
        dtype: torch.dtype,
        num_kv_heads: int = 1,
        tied_embeddings: bool = False,
        adapters: Adapters | None = None,
        pause: str = "abort",
        timeout: float = 300.0,
        objects: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.version: int | None = None
        self._plan, self._shards = plan, local_shards(plan, chunks, merged=adapters is None)
        self._adapters = adapters
        self._dtype, self._transport = dtype, transport
        self._objects, self._bucket_bytes, self._timeout = objects, bucket_bytes, timeout
        self._coordinator, self._http = None, control_client()
        if targets is not None:
            self._coordinator = SyncCoordinator(
                targets,
                transport,
                http=self._http,
                pause=pause,
                timeout=timeout,
                num_kv_heads=num_kv_heads,
                tied_embeddings=tied_embeddings,
                adapter_config=None if adapters is None else adapters.config,
            )

    def update_weights(self, version: int, *, full: bool = False) -> SyncReport:
        """Sends what training can change to every server as version `version`, and all else to
        those that need it (`full`: to all).

        Collective over all trainer ranks. A server that fails is told to `targets`, and the others
        go on. WeightSyncError on every rank when none is left: the version has not advanced, and
        the next push that succeeds heals. RolloutServerError when `targets` says so.
        """
        started = time.monotonic()
        failed: set[str] = set()  # in this push
        report = None
        while report is None:  # again for the servers that are left
            report = self._attempt(version, full, failed, started)
        self.version = version
        return report

    def close(self) -> None:
        """Gives back what the transport holds, and what servers were given for this run alone.
        Collective.
        """
        if self._coordinator is not None:
            self._coordinator.finish()
        self._transport.close()
        self._http.close()

    def _attempt(
        self, version: int, full: bool, failed: set[str], started: float
    ) -> SyncReport | None:
        round_ = self._agree(version, lambda rank_0: rank_0.open(failed, full=full))
        sent = self._send(round_)
        pairs = [] if self._adapters is None else self._adapters.gather(self._dtype)

        def close(rank_0: SyncCoordinator) -> SyncReport | None:
            closed = rank_0.close(round_, sent, str(version), failed, pairs)
            if closed is None:
                return None
            return SyncReport(seconds=time.monotonic() - started, **asdict(closed))

        return self._agree(version, close)

    def _agree(self, version: int, decide: Callable[[SyncCoordinator], T]) -> T:
        """What rank 0 decides, or its error, on every rank."""
        box: list[Any] = [None]
        if self._coordinator is not None:
            try:
                box = [decide(self._coordinator)]
            except (WeightSyncError, RolloutServerError) as error:
                box = [error]
        dist.broadcast_object_list(box, src=0, group=self._objects)
        (outcome,) = box
        if isinstance(outcome, WeightSyncError):
            raise WeightSyncError(f"weight version {version} was not pushed: {outcome}")
        if isinstance(outcome, RolloutServerError):
            raise outcome
        return outcome

    def _send(self, round_: Round) -> list[Sent]:
        """Gathers bucket by bucket, where it is sent from. Returns, on rank 0, what each sending
        rank says of it.
        """
        rank, senders = dist.get_rank(), self._senders()
        buckets = self._plan.buckets(
            full=bool(round_.refitted), itemsize=self._dtype.itemsize, max_bytes=self._bucket_bytes
        )
        with ExitStack() as stack:
            sender = None
            if rank in senders:
                turn = self._turn(senders)
                sender = Sender(
                    self._transport, round_, turn, timeout=self._timeout, http=self._http
                )
                stack.enter_context(sender)
            for bucket in buckets:
                to = senders[bucket.stage % len(senders)]
                tensors = gather(self._plan, bucket.entries, self._shards, self._dtype, to=to)
                if sender is not None and rank == to:
                    sender.put(tensors, changed=bucket.changed)
        mine = None if sender is None else sender.sent()
        everyone: list[Sent | None] | None = None
        if rank == 0:
            everyone = [None] * dist.get_world_size()
        dist.gather_object(mine, everyone, group=self._objects)
        return [sent for sent in everyone or () if sent is not None]

    def _senders(self) -> list[int]:
        """The ranks that send, by pipeline stage; one alone sends what all stages hold."""
        trainer = self._plan.trainer
        stages = trainer.layout.pipeline if self._transport.by_stage else 1
        return [trainer.first_of(stage) for stage in range(stages)]

    def _turn(self, senders: Sequence[int]) -> Turn:
        if not self._transport.together:
            return Turn(None, None, None)
        place = senders.index(dist.get_rank())
        before = senders[place + 1] if place + 1 < len(senders) else None
        return Turn(senders[place - 1] if place else None, before, self._objects)
