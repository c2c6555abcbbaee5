"""One push of the trainer's weights to the servers, versioned and verified."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from megavlm.models.common.mapping import Entry
from megavlm.rollout.errors import WeightSyncError
from megavlm.rollout.weights import verify
from megavlm.rollout.weights.gather import NamedTensors, gather
from megavlm.rollout.weights.plan import Place, local_shards, make_plan
from megavlm.rollout.weights.servers import Servers
from megavlm.rollout.weights.transports.base import Transport

PORTION_BYTES = 2**28


@dataclass(frozen=True)
class SyncReport:
    """A push, the same on every rank.

    bytes: what left rank 0, to all servers together. tensors: HF tensors. checked: engine tensors
    whose checksums were compared.
    """

    seconds: float
    bytes: int
    tensors: int
    checked: int


class WeightSync:
    """Pushes a model's weights to servers. Made by all trainer ranks together.

    chunks: this rank's part of the model. place: this rank on an axis that cuts tensors.
    servers and transport: given on global rank 0, None elsewhere. dtype: what the servers hold.
    objects: a group over all ranks for Python objects; None is the default group.
    portion_bytes: memory that full tensors may take on rank 0 at a time.
    `version` is that of the last push that succeeded, None before the first.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        chunks: Sequence[MegatronModule],
        *,
        place: Place,
        servers: Servers | None,
        transport: Transport | None,
        dtype: torch.dtype,
        objects: dist.ProcessGroup | None = None,
        portion_bytes: int = PORTION_BYTES,
    ) -> None:
        self.version: int | None = None
        self._shards, changed = local_shards(entries, chunks)
        self._plan = make_plan(entries, self._shards, changed, place, objects)
        self._dtype = dtype
        self._servers, self._transport = servers, transport
        self._objects, self._portion_bytes = objects, portion_bytes
        self._comparable = servers is not None and verify.comparable(servers)

    def push(self, version: int, *, full: bool = False) -> SyncReport:
        """Sends what training can change (`full`: everything) as version `version`.

        Collective over all trainer ranks. Raises WeightSyncError on each of them when it failed:
        the version has not advanced, the servers' weights may be mixed, and the next push that
        succeeds heals them.
        """
        started = time.monotonic()
        portions_of_tensors = self._gather_portions(full)
        outcome: list[SyncReport | str | None] = [None]
        if self._transport is not None:
            try:
                num_bytes, num_tensors, checked = self._send(portions_of_tensors, str(version))
                seconds = time.monotonic() - started
                outcome = [SyncReport(seconds, num_bytes, num_tensors, checked)]
            except WeightSyncError as error:
                outcome = [str(error)]
                self._transport.abort()
        for _ in portions_of_tensors:
            pass  # all of them on the other ranks, those left by an error on rank 0: nobody waits
        dist.broadcast_object_list(outcome, src=0, group=self._objects)
        (report,) = outcome
        if not isinstance(report, SyncReport):
            raise WeightSyncError(f"weight version {version} was not pushed: {report}")
        self.version = version
        return report

    def _gather_portions(self, full: bool) -> Iterator[NamedTensors]:
        """Full HF tensors on rank 0, portion by portion. Collective."""
        portions = self._plan.portions(
            full=full, itemsize=self._dtype.itemsize, max_bytes=self._portion_bytes
        )
        for portion in portions:
            yield gather(self._plan, portion, self._shards, self._dtype)

    def _send(
        self, portions_of_tensors: Iterable[NamedTensors], version: str
    ) -> tuple[int, int, int]:
        """Rank 0's part: bytes sent, tensors sent, tensors checked."""
        assert self._servers is not None and self._transport is not None
        num_bytes = num_tensors = 0
        expected: dict[str, str] = {}
        self._transport.begin()
        for tensors in portions_of_tensors:
            num_bytes += self._transport.send(tensors)
            num_tensors += len(tensors)
            if self._comparable:
                expected |= verify.checksums(tensors)
        self._transport.commit()
        if expected:
            verify.check_checksums(self._servers, expected)
        # Last: until here a server that is asked says the old version.
        self._servers.post(
            "/update_weight_version", {"new_version": version, "abort_all_requests": False}
        )
        verify.check_version(self._servers, version)
        return num_bytes, num_tensors, len(expected)
