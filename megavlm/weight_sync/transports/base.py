"""Interface of the transports that send tensors to servers."""

from typing import Any, Protocol

from megavlm.config.transports import TransportTraits
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.update import SyncAttempt, TensorBucket


class Transport(Protocol):
    """Sends tensors to servers. Every trainer rank has one transport.

    In an attempt each sending rank opens the transport (rank 0 before all others), sends its
    buckets and finishes; then rank 0 completes the attempt. A failed server is marked in
    `servers.lost`, and the update continues on the others. WeightSyncError is raised if none is
    left, TrainerFault if no server caused the failure. A transport never flushes the servers'
    caches, because the coordinator does so once.
    """

    traits: TransportTraits

    def open(self, servers: Servers, attempt: SyncAttempt) -> Any:
        """Prepare to send to the servers of an attempt. The attempt before may be incomplete.

        On rank 0, returns the value of `attempt.rendezvous` for the other ranks.
        """

    def send(self, bucket: TensorBucket) -> int:
        """Send the tensors of a bucket. Returns the bytes sent by this process to all servers
        together.
        """

    def finish(self) -> None:
        """Finish this rank's sending. It is called after the last bucket, if none failed."""

    def complete(self, attempt: SyncAttempt) -> None:
        """Block until the servers have loaded all tensors of an attempt. It is called on rank 0
        only, after all ranks have finished.
        """

    def close(self) -> None:
        """Release this rank's resources, at the end of the run."""
