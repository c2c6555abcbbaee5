"""Double buffering: one bucket is on its way while the next is gathered, and there is no third."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from megavlm.parallel import platform

Bucket = TypeVar("Bucket")


class DoubleBuffer(Generic[Bucket]):
    """Sends on a thread of its own, one bucket after the other. A context: leaving it waits."""

    def __init__(self, send: Callable[[Bucket], None]) -> None:
        self._send = send
        self._pool = ThreadPoolExecutor(1, initializer=platform.join, initargs=(platform.device(),))
        self._last: Future[None] | None = None

    def put(self, bucket: Bucket) -> None:
        """Hands a bucket over once the one before has arrived; raises what sending that raised."""
        self.wait()
        self._last = self._pool.submit(self._send, bucket)

    def wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> "DoubleBuffer[Bucket]":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
