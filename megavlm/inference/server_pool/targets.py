"""What a weight push needs to know of the servers: the seam between the fleet and the sync."""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Target:
    """A server that can take weights now.

    device: "cpu" or "cuda". needs_all: it was (re)started or failed a push; it needs every tensor,
    not only what training changes. The keys open its read and its admin endpoints; they are left
    out of the representation, so that no log shows them.
    """

    url: str
    tensor_parallel: int
    device: str
    needs_all: bool
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)


class Targets(Protocol):
    """The fleet, as a push sees it. Used on the driver alone, from any thread.

    All but `refitted` raise RolloutServerError when fewer servers than rollout.min_servers can ever
    be left.
    """

    def targets(self, without: Container[str] = ()) -> list[Target]:
        """Healthy and stale servers, never dead or starting ones, nor those `without`."""

    def refitted(self, url: str, version: str) -> None:
        """Verified: the server has exactly the weights `version`; requests may go to it."""

    def failed(self, url: str, reason: str) -> None:
        """A push failed at it: without requests until it is refitted."""

    def mismatched(self, url: str, reason: str) -> None:
        """The same, as it holds other tensors than it was sent."""
