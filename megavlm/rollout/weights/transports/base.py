"""How tensors reach servers: one interface, one file per way."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Transport(Protocol):
    """Used by rank 0 alone: `begin`, any number of `send`, then `commit` or `abort`.

    Tensors are whole, contiguous or not, under their HF names. Every method but `abort` raises
    WeightSyncError.
    """

    def begin(self) -> None:
        """Prepares all servers for new weights."""

    def send(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        """Hands tensors over; the bytes that left this process."""

    def commit(self) -> None:
        """Returns when every server has loaded all that was sent."""

    def abort(self) -> None:
        """Leaves the servers able to take the next push; their weights may be mixed until then."""

    def close(self) -> None:
        """Gives back what the transport holds."""
