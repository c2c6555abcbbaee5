"""How far a conversion is: bytes, speed and time left, on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Advance = Callable[[int], None]  # by so many bytes
Show = Callable[[str, int], AbstractContextManager[Advance]]  # what, and how many bytes in all


@contextmanager
def silent(what: str, nbytes: int) -> Iterator[Advance]:
    yield lambda _: None


@contextmanager
def progress_bar(what: str, nbytes: int) -> Iterator[Advance]:
    """On the terminal that standard error is; without one nothing is shown."""
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
        task = bar.add_task(what, total=nbytes)
        yield lambda count: bar.advance(task, count)


def size(nbytes: float) -> str:
    """For a reader: 7.51 GB."""
    units = ["GB", "MB", "kB", "bytes"]
    while nbytes >= 1000 and len(units) > 1:
        nbytes /= 1000
        units.pop()
    return f"{nbytes:.4g} {units[-1]}"
