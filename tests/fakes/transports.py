"""A transport that calls back before each bucket that it sends."""

from collections.abc import Callable

from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.transports.tensor import TensorDelivery, TensorTransport
from megavlm.weight_sync.update import SyncAttempt, TensorBucket


class WatchedTransport(TensorTransport):
    def __init__(self, before: Callable[[], object]) -> None:
        self._before = before

    def open(self, servers: Servers, attempt: SyncAttempt) -> TensorDelivery:
        return WatchedDelivery(self._before, servers, attempt)


class WatchedDelivery(TensorDelivery):
    def __init__(
        self, before: Callable[[], object], servers: Servers, attempt: SyncAttempt
    ) -> None:
        super().__init__(servers, attempt)
        self._before = before

    def send(self, bucket: TensorBucket) -> int:
        self._before()
        return super().send(bucket)
