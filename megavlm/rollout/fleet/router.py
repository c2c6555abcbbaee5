"""Requests through an sglang-router, which chooses the server; weights go to the servers directly.

The router may send a request to any server that answers, so none may be behind: requests wait for
a refit where one is stale. It also hides which server answered: what goes wrong is asked of all.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from megavlm.rollout.fleet.fleet import Fleet
from megavlm.rollout.fleet.routing import Address, Outlook
from megavlm.rollout.fleet.state import ANSWERING, State


class BehindRouter:
    """A fleet's Routing with one address."""

    def __init__(self, fleet: Fleet, url: str, api_key: str | None) -> None:
        self._fleet = fleet
        self._address = Address(url.rstrip("/"), api_key)

    def routable(self, version: str | None) -> list[Address]:
        current = {address.url for address in self._fleet.routable(version)}
        members = self._fleet.members
        answering = {url for url in members if self._fleet.record(url).state in ANSWERING}
        return [self._address] if current and current == answering else []

    def outlook(self, version: str | None) -> Outlook:
        return self._fleet.outlook(version)

    def lost(self, url: str, version: str | None) -> bool:
        return all(self._fleet.lost(member, version) for member in self._fleet.members)

    def answered(self, url: str) -> None:
        pass

    def unanswered(self, url: str, reason: str) -> None:
        for member in self._fleet.members:
            self._fleet.unanswered(member, reason)

    def wrong_version(self, url: str, reason: str) -> None:
        for member in self._fleet.members:
            if self._fleet.record(member).state is State.HEALTHY:
                self._fleet.wrong_version(member, reason)

    def in_use(self, on_change: Callable[[], object]) -> AbstractContextManager[None]:
        return self._fleet.in_use(on_change)
