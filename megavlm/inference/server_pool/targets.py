"""Interface between the server pool and the weight sync: the servers that a push goes to."""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Target:
    """A server that can take weights now.

    tensor_parallel: number of its ranks. device: "cpu" or "cuda". needs_all: it (re)started or
    failed a push, and needs every tensor, not only those that training changes. api_key, admin_key:
    for its read and its admin endpoints; left out of the representation, so that no log has them.
    is_local: its ranks run on this machine as this user, and can read this process's files.
    """

    url: str
    tensor_parallel: int
    device: str
    needs_all: bool
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    is_local: bool = False


class Targets(Protocol):
    """The server pool, as a push sees it. Used on the driver alone, from any thread.

    All methods but `refitted` raise RolloutServerError when fewer than rollout.min_servers servers
    can be left.
    """

    def targets(self, without: Container[str] = ()) -> list[Target]:
        """Return the healthy and stale servers but those whose URL is in `without`."""

    def refitted(self, url: str, version: str) -> None:
        """Mark a server as holding exactly the weights `version`, verified; it gets requests."""

    def failed(self, url: str, reason: str) -> None:
        """Report that a push failed at a server; it gets no requests until it is refitted."""

    def mismatched(self, url: str, reason: str) -> None:
        """Report a failed push after which the server holds other tensors than it was sent."""
