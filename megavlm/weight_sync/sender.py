"""Double-buffered sending of one rank's buckets in an attempt."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from megavlm.inference.errors import TrainerFault, WeightSyncError
from megavlm.parallel import platform
from megavlm.weight_sync import checksums as verify
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import begins_tensor
from megavlm.weight_sync.transports.base import Delivery
from megavlm.weight_sync.update import SendReport, SyncAttempt, TensorBucket


class Sender:
    """Sends one rank's buckets in an attempt, on a separate thread.

    open: Opens the rank's transport, or returns the delivery if that is open already.
    """

    def __init__(
        self, open: Callable[[], Delivery], servers: Servers, attempt: SyncAttempt
    ) -> None:
        self._open, self._servers, self._attempt = open, servers, attempt
        self._delivery: Delivery | None = None
        self._bytes = self._tensors = 0
        self._changed, self._rest = verify.Checksums(), verify.Checksums()
        self._error: str | None = None
        self._is_own_fault = False

    def send(self, buckets: Iterable[TensorBucket]) -> SendReport:
        """Send all buckets. An error is returned in the report and not raised.

        Sends are double-buffered: while one bucket is in flight, `buckets` gathers the next. After
        a failure the remaining buckets are still gathered, and then dropped, because gathering is
        collective and other ranks would hang.
        """
        with ThreadPoolExecutor(1, "sender", platform.join, (platform.device(),)) as pool:
            last: Future[None] = pool.submit(self._begin)
            for bucket in buckets:
                last.result()
                last = pool.submit(self._deliver, bucket)
            last.result()
            pool.submit(self._finish).result()
        return SendReport(
            self._bytes,
            self._tensors,
            self._changed.result(),
            self._rest.result(),
            dict(self._servers.lost),
            self._error,
            self._is_own_fault,
        )

    def _begin(self) -> None:
        try:
            self._delivery = self._open()
        except WeightSyncError as error:
            self._fail(error)

    def _deliver(self, bucket: TensorBucket) -> None:
        if self._delivery is None:
            return
        try:
            self._bytes += self._delivery.send(bucket)
        except WeightSyncError as error:
            self._fail(error)
            return
        self._tensors += sum(begins_tensor(name) for name, _ in bucket.tensors)
        attempt = self._attempt
        devices = {
            attempt.layouts[receiver.url]: receiver.device
            for receiver in attempt.receivers
            if receiver.url in attempt.compared and receiver.url in bucket.urls
        }
        (self._changed if bucket.changed else self._rest).add(bucket.tensors, devices)

    def _finish(self) -> None:
        if self._delivery is not None:
            try:
                self._delivery.finish()
            except WeightSyncError as error:
                self._fail(error)

    def _fail(self, error: WeightSyncError) -> None:
        self._delivery = None  # nothing more is sent
        self._error, self._is_own_fault = str(error), isinstance(error, TrainerFault)
