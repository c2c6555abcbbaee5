"""An output folder: refused where something is, complete or not there at all."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint_tools.progress import size
from megavlm.checkpointing import atomic, folder

# For configuration, tokenizer and tables of contents, beside the weights.
_SPARE_BYTES = 50 * 10**6


@contextmanager
def output_folder(
    target: Path, *, sources: Iterable[Path], force: bool, mark: str, nbytes: int
) -> Iterator[Path]:
    """Yields a partial folder beside `target`, and gives it that name at the end.

    `sources`: the folders that it is made of, none of which it may replace. With `force` an older
    folder is replaced, but only one that holds a file like `mark`, so that a mistyped path does not
    delete a home directory. On an error nothing is left; what a killed conversion left is removed.
    ValueError where another conversion writes the same folder, or its disk has less room than
    `nbytes` of weights need.
    """
    target = _resolved(target)
    for path in (target, *target.parents):
        if path.is_file():
            raise ValueError(f"{path} is a file: name a folder.")
    if os.path.ismount(target):  # which no other folder can replace
        raise ValueError(f"{target} is where a disk is mounted: name a folder in it.")
    _check_sources(target, sources)
    if target.is_dir() and any(target.iterdir()):
        if not force:
            raise ValueError(f"{target} is not empty: choose another folder, or add --force.")
        if not any(target.glob(mark)):
            raise ValueError(f"{target} holds no {mark}: --force does not replace such a folder.")
    partial = atomic.partial(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        if partial.exists():
            shutil.rmtree(partial)
        _check_room(target, nbytes)
        try:
            partial.mkdir()
            yield partial
            atomic.replace_folder(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _resolved(target: Path) -> Path:
    """A link stays, and what it points to is replaced."""
    try:
        return target.resolve()
    except RuntimeError as error:
        raise ValueError(f"{target} is a link that leads back to itself: name a folder.") from error


def _check_sources(target: Path, sources: Iterable[Path]) -> None:
    """None of the files goes when the target is replaced, and the target not when a step goes."""
    for source in sources:
        # A file may be a link to another place.
        for path in (source, *filter(Path.is_file, source.iterdir())):
            if path.resolve().is_relative_to(target):
                raise ValueError(
                    f"{target} holds {path}, which is read: replacing it would delete that; choose "
                    f"another folder."
                )
        if (source / folder.MANIFEST).is_file() and target.is_relative_to(source.resolve()):
            raise ValueError(
                f"{target} lies in a step, which holds nothing else: choose another folder."
            )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One conversion at a time: a second would remove the partial folder of the first."""
    path = target.with_name(f".{target.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{target} is being written by another process.") from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
                raise
        try:
            yield
        finally:
            path.unlink()


def _check_room(target: Path, nbytes: int) -> None:
    disk = os.statvfs(target.parent)
    free, needed = disk.f_bavail * disk.f_frsize, nbytes + _SPARE_BYTES
    if free < needed:
        raise ValueError(f"{target} needs {size(needed)}, and {size(free)} are free on its disk.")
