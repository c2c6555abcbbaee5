"""Reading and writing at the same time."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def one_ahead(make: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`make(item)` of each item, in order. A thread makes the next while the caller works on one:
    no more than two are in memory.
    """
    with ThreadPoolExecutor(1) as thread:
        current: Future[R] | None = None
        for item in items:
            following = thread.submit(make, item)
            if current is not None:
                yield current.result()
            current = following
        if current is not None:
            yield current.result()
