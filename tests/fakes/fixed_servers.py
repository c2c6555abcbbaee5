"""Routing to servers that nobody supervises, for tests of the client alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server_pool.routing import Address


class FixedServers:
    """Routing in which every server is always routable."""

    def __init__(
        self,
        *urls: str,
        api_key: str | None = None,
        admin_key: str | None = None,
        is_local: bool = False,
        takes_videos: bool = False,
        cache_tokens: int | None = None,
    ) -> None:
        self._addresses = [
            Address(url, api_key, admin_key, is_local, takes_videos or is_local, cache_tokens)
            for url in urls
        ]

    def routable(self, version: str | None) -> list[Address]:
        return list(self._addresses)

    def lacks_weights(self) -> bool:
        raise AssertionError("they are always routable")

    def lost(self, url: str, version: str | None) -> bool:
        return False

    def answered(self, url: str) -> None:
        pass

    def request_failed(self, url: str, reason: str) -> None:
        pass

    def wrong_version(self, url: str, reason: str) -> None:
        raise RolloutServerError(reason)

    def in_use(self, on_change: Callable[[], object]) -> AbstractContextManager[None]:
        return nullcontext()
