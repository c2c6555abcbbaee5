"""Interface of the transports that send tensors to servers."""

from typing import Any, Protocol

from megavlm.config.transports import TransportTraits
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.update import SyncAttempt, TensorBucket


class Delivery:
    """Sending of one trainer rank's buckets in an attempt.

    Each sending rank sends its buckets and finishes; then rank 0 completes the attempt. A failed
    server is marked in `servers.lost`, and the update continues on the others. WeightSyncError is
    raised if none is left, TrainerFault if no server caused the failure. A delivery never flushes
    the servers' caches, because the coordinator does so once.

    rendezvous: On rank 0, the value of `SyncAttempt.rendezvous` for the other ranks.
    """

    rendezvous: Any = None

    def send(self, bucket: TensorBucket) -> int:
        """Send the tensors of a bucket. Returns the bytes sent by this process to all servers
        together.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Finish this rank's sending. It is called after the last bucket, if none failed."""

    def complete(self) -> None:
        """Block until the servers have loaded all tensors. It is called on rank 0 only, after all
        ranks have finished.
        """


class Transport(Protocol):
    """Sends tensors to servers. Every trainer rank has one transport."""

    traits: TransportTraits

    def open(self, servers: Servers, attempt: SyncAttempt) -> Delivery:
        """Prepare to send to the servers of an attempt, on rank 0 before all other sending ranks.
        The attempt before may be incomplete.
        """

    def close(self) -> None:
        """Release this rank's resources, at the end of the run."""
