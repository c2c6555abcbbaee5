"""An output folder: refused where something is, complete or not there at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megavlm.checkpointing import atomic


@contextmanager
def output_folder(target: Path, *, force: bool, mark: str) -> Iterator[Path]:
    """Yields a partial folder beside `target`, and gives it that name at the end.

    With `force` an older folder is replaced, but only one that holds a file like `mark`, so that a
    mistyped path does not delete a home directory. On an error nothing is left.
    """
    target = target.absolute()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file: name a folder.")
    if target.is_dir() and any(target.iterdir()):
        if not force:
            raise ValueError(f"{target} is not empty: choose another folder, or add --force.")
        if not any(target.glob(mark)):
            raise ValueError(f"{target} holds no {mark}: --force does not replace such a folder.")
    partial = atomic.partial(target)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        atomic.replace_folder(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
