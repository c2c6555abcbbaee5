"""Interface between the server pool and the weight sync: the servers that receive a push."""

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Receiver:
    """A server that can take weights now.

    tensor_parallel: Number of its ranks. device: "cpu" or "cuda". needs_all: True if it started,
    restarted or failed a push, so that it needs every tensor and not only the ones that training
    changes. api_key, admin_key: Keys for its read and its admin endpoints; they are left out of the
    repr, so that no log has them. node: Index of the trainer's node on which its ranks run, as the
    same user as the trainer ranks there, so that they can open these ranks' files and GPU memory;
    None if it shares no memory with a trainer rank. Global rank r is on node r //
    LOCAL_WORLD_SIZE.
    """

    url: str
    tensor_parallel: int
    device: str
    needs_all: bool
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    node: int | None = None


class Receivers(Protocol):
    """A weight push's view of the server pool. It is used on the driver only, from any thread.

    All methods except `refitted` raise RolloutServerError when fewer than rollout.min_servers
    servers are left.
    """

    def receivers(self, without: Container[str] = ()) -> list[Receiver]:
        """Return the healthy and stale servers, except those whose URL is in `without`."""

    def refitted(self, url: str, version: str) -> None:
        """Mark a server as holding exactly the weights `version`, after verification. It gets
        requests then.
        """

    def catch_up_by(self, catch_up: Callable[[Receiver], str | None]) -> None:
        """Have servers without the weights brought up to date between pushes. catch_up: Function
        that does so, from any thread, and returns the version that a server then has, or None if it
        must wait for a push. It raises WeightSyncError if the server fails.
        """

    def failed(self, url: str, reason: str) -> None:
        """Report that a push to a server failed. It gets no requests until it is refitted."""

    def mismatched(self, url: str, reason: str) -> None:
        """Report a failed push after which the server's tensors differ from the tensors sent."""
