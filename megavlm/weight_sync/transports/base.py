"""Interface of the transports, which bring tensors to servers."""

from typing import Any, Protocol

from megavlm.weight_sync.attempt import SyncAttempt, TensorBucket
from megavlm.weight_sync.server_api import Servers


class Transport(Protocol):
    """Transport of tensors, one object on every trainer rank.

    In an attempt each rank that sends opens the transport, rank 0 before all others, sends its
    buckets and finishes; then rank 0 completes the attempt. A server that fails is lost to
    `servers`, and the others go on. WeightSyncError is raised if none is left, TrainerFault if no
    server caused the failure. A transport never flushes the servers' caches: the coordinator does
    so once.

    by_stage: the first rank of each pipeline stage sends the stage's tensors, all at the same time;
    otherwise rank 0 sends everything.
    in_session: servers take the tensors only between begin_weight_update and end_weight_update.
    slices: ranks of servers that have our loaders are sent only what they store.
    """

    by_stage: bool
    in_session: bool
    slices: bool

    def open(self, servers: Servers, attempt: SyncAttempt) -> Any:
        """Prepare to send to the servers of an attempt, after any earlier one, complete or not.

        On rank 0, returns what the other ranks need, as `attempt.rendezvous`.
        """

    def send(self, bucket: TensorBucket) -> int:
        """Send tensors. Returns the bytes of tensors that left this process, to all servers."""

    def finish(self) -> None:
        """Finish this rank's sending, after its last bucket if none failed."""

    def complete(self, attempt: SyncAttempt) -> None:
        """Block until the servers have loaded an attempt. Called on rank 0, after all ranks have
        finished.
        """

    def close(self) -> None:
        """Release what this rank holds, at the end of the run."""
