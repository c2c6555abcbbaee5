"""Servers without supervision, as receivers of weight updates."""

from collections.abc import Container, Sequence
from dataclasses import replace

from megavlm.inference.errors import ServersFailed
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.update import SyncReport


class FixedReceivers:
    """Receivers that never give up a server. One that fails needs every tensor from then on."""

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self._receivers = {receiver.url: receiver for receiver in receivers}

    def receivers(self, without: Container[str] = ()) -> list[Receiver]:
        return [receiver for url, receiver in self._receivers.items() if url not in without]

    def refitted(self, url: str, version: str) -> None:
        self._receivers[url] = replace(self._receivers[url], needs_all=False)

    def failed(self, url: str, reason: str) -> None:
        self._receivers[url] = replace(self._receivers[url], needs_all=True)

    def mismatched(self, url: str, reason: str) -> None:
        self.failed(url, reason)


def push(sync: WeightSync, version: int) -> SyncReport:
    """Push to the servers that do not fail. Raises ServersFailed if all do. Collective."""
    failed: frozenset[str] = frozenset()
    while True:
        try:
            return sync.update_weights(version, without=failed)
        except ServersFailed as error:
            if not error.left:
                raise
            failed |= error.urls
