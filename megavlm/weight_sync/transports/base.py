"""Interface of the transports that send tensors to servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megavlm.config.transports import TransportTraits
from megavlm.weight_sync.gather import LocalShard
from megavlm.weight_sync.ownership import SyncPlan
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.update import SendReport, SyncAttempt, SyncSettings


@dataclass(frozen=True)
class Sending:
    """One rank's part of an attempt.

    shards: This rank's shards, by index of the entry. servers: The servers, on rank 0, which makes
    all requests; None on other ranks.
    """

    plan: SyncPlan
    shards: Mapping[int, LocalShard]
    settings: SyncSettings
    attempt: SyncAttempt
    servers: Servers | None


class Transport(Protocol):
    """Sends tensors to servers. Every trainer rank has one transport.

    A failed server is marked in `servers.lost`. WeightSyncError is raised if an attempt cannot
    continue, TrainerFault if no server caused the failure.
    """

    traits: TransportTraits

    def prepare(self, servers: Servers, attempt: SyncAttempt) -> Any:
        """Prepare an attempt, on rank 0. Returns the value of `SyncAttempt.rendezvous` for all
        ranks. The attempt before may be incomplete.
        """

    def send(self, sending: Sending) -> SendReport:
        """Send this rank's part. An error is returned in the report and not raised. Collective."""

    def complete(self, sending: Sending, reports: Sequence[SendReport]) -> int:
        """Block until the servers have loaded and verified all tensors, on rank 0. Servers that
        hold other tensors are marked as lost. Returns the number of tensors that were verified.
        """

    def close(self) -> None:
        """Release this rank's resources, at the end of the run."""
