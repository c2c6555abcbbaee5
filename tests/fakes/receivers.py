"""Servers without supervision, as targets of weight updates."""

from collections.abc import Container, Sequence
from dataclasses import replace

from megavlm.inference.server_pool.receivers import Target


class FixedTargets:
    """Targets that never give up a server. One that fails needs every tensor from then on."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = {target.url: target for target in targets}

    def targets(self, without: Container[str] = ()) -> list[Target]:
        return [target for url, target in self._targets.items() if url not in without]

    def refitted(self, url: str, version: str) -> None:
        self._targets[url] = replace(self._targets[url], needs_all=False)

    def failed(self, url: str, reason: str) -> None:
        self._targets[url] = replace(self._targets[url], needs_all=True)

    def mismatched(self, url: str, reason: str) -> None:
        self.failed(url, reason)
