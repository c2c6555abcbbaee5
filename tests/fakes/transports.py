"""A transport that calls back when it begins to send and after each bucket."""

from collections.abc import Callable

from megavlm.weight_sync.transports.tensor import TensorTransport
from tests.support.timeouts import scaled


class WatchedTransport(TensorTransport):
    def __init__(self, after: Callable[[], object]) -> None:
        super().__init__(timeout=scaled(30))
        self._after = after

    def note_progress(self) -> None:
        super().note_progress()
        self._after()
