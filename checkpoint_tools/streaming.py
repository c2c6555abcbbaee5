"""Helpers of streaming conversion: a prefetch thread, a progress bar, sizes for readers."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Item = TypeVar("Item")
Made = TypeVar("Made")

Advance = Callable[[int], None]  # argument: number of bytes
ShowProgress = Callable[[str, int], AbstractContextManager[Advance]]  # title, total bytes


def prefetch(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """Yield `make(item)` for each item, in order. A thread computes the next result while the
    caller uses the current one, so at most two are in memory.
    """
    with ThreadPoolExecutor(1) as thread:
        current: Future[Made] | None = None
        for item in items:
            following = thread.submit(make, item)
            if current is not None:
                yield current.result()
            current = following
        if current is not None:
            yield current.result()


@contextmanager
def no_progress(title: str, nbytes: int) -> Iterator[Advance]:
    yield lambda _: None


@contextmanager
def progress_bar(title: str, nbytes: int) -> Iterator[Advance]:
    """Show bytes, speed and time left on standard error if it is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=nbytes)
        yield lambda count: bar.advance(task, count)


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes, such as 7.51 GB."""
    units = ["GB", "MB", "kB", "bytes"]
    while nbytes >= 1000 and len(units) > 1:
        nbytes /= 1000
        units.pop()
    return f"{nbytes:.4g} {units[-1]}"
