"""Requests through an sglang-router. The router chooses the server; weights are sent to the servers
directly.

The router may send a request to any server that answers, so all of them must have the weights, and
requests wait for a refit while one is stale. The router also hides which server answered, so a
failure is reported for all of them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.routing import Address
from megavlm.inference.server_pool.state import ANSWERING, State


class BehindRouter:
    """Routing for a server pool behind the address of a router."""

    def __init__(self, server_pool: ServerPool, url: str, api_key: str | None) -> None:
        self._server_pool = server_pool
        self._address = Address(url.rstrip("/"), api_key)

    def routable(self, version: str | None) -> list[Address]:
        current = {address.url for address in self._server_pool.routable(version)}
        urls = self._server_pool.handles
        answering = {url for url in urls if self._server_pool.record(url).state in ANSWERING}
        return [self._address] if current and current == answering else []

    def lacks_weights(self) -> bool:
        return self._server_pool.lacks_weights()

    def lost(self, url: str, version: str | None) -> bool:
        return all(self._server_pool.lost(server, version) for server in self._server_pool.handles)

    def answered(self, url: str) -> None:
        pass

    def request_failed(self, url: str, reason: str) -> None:
        for server in self._server_pool.handles:
            self._server_pool.request_failed(server, reason)

    def wrong_version(self, url: str, reason: str) -> None:
        for server in self._server_pool.handles:
            if self._server_pool.record(server).state is State.HEALTHY:
                self._server_pool.wrong_version(server, reason)

    def in_use(self, on_change: Callable[[], object]) -> AbstractContextManager[None]:
        return self._server_pool.in_use(on_change)
