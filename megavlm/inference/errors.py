"""Errors of rollout servers, by how callers handle them."""

from collections.abc import Iterable


class RolloutServerError(RuntimeError):
    """A server did not start, died, or cannot be reached."""


class RolloutRequestError(RuntimeError):
    """A request failed for good: the server refused it, or its response cannot be used."""


class WeightSyncError(RuntimeError):
    """A weight push failed; the servers' weight version did not advance."""


class ServersFailed(WeightSyncError):
    """Servers failed in a push, so that some did not get everything. Another push may succeed.

    urls: The servers that failed. left: Number of servers that took part and did not fail.
    """

    def __init__(self, reason: str, urls: Iterable[str] = (), left: int = 0) -> None:
        super().__init__(reason)
        self.urls, self.left = frozenset(urls), left


class TrainerFault(WeightSyncError):
    """A push failed on the trainer's side. No server is at fault, so a retry would not help."""
