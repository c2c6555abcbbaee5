"""What the client asks of the servers it may use; the fleet answers, or a fixed list does."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from megavlm.inference.errors import RolloutServerError


@dataclass(frozen=True)
class Address:
    """Where requests go, and what opens it."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)


class Outlook(Enum):
    """What is to be done when no server is routable."""

    WAIT = "wait"  # one may become routable by itself, or come back stale
    REFIT = "refit"  # one answers and lacks the weights


class Routing(Protocol):
    """Used from any thread. `routable` and `outlook` raise RolloutServerError when there can never
    be enough servers again.
    """

    def routable(self, version: str | None) -> list[Address]:
        """Servers that may get new requests for weights of `version`; None: of any."""

    def outlook(self, version: str | None) -> Outlook: ...

    def lost(self, url: str, version: str | None) -> bool:
        """Whether requests in flight there will not be answered by the wanted weights."""

    def answered(self, url: str) -> None: ...

    def unanswered(self, url: str, reason: str) -> None:
        """A request failed there by a lost connection, a time-out, a 5xx or garbage."""

    def wrong_version(self, url: str, reason: str) -> None:
        """A response there came from other weights than were wanted."""

    def in_use(self, on_change: Callable[[], object]) -> AbstractContextManager[None]:
        """While requests are made; `on_change` is called from any thread when a server's state
        changes.
        """


class FixedServers:
    """Addresses that nobody watches: each may always be asked."""

    def __init__(self, urls: Sequence[str], api_key: str | None, admin_key: str | None) -> None:
        if not urls:
            raise ValueError("rollout.urls is empty; give the address of at least one server.")
        self._addresses = [Address(url.rstrip("/"), api_key, admin_key) for url in urls]

    def routable(self, version: str | None) -> list[Address]:
        return list(self._addresses)

    def outlook(self, version: str | None) -> Outlook:
        raise AssertionError("they are always routable")

    def lost(self, url: str, version: str | None) -> bool:
        return False

    def answered(self, url: str) -> None:
        pass

    def unanswered(self, url: str, reason: str) -> None:
        pass

    def wrong_version(self, url: str, reason: str) -> None:
        raise RolloutServerError(reason)

    def in_use(self, on_change: Callable[[], object]) -> AbstractContextManager[None]:
        return nullcontext()
