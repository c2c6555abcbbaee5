"""Output folders that are complete or absent, and never replace other data."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint_tools.streaming import format_bytes
from megavlm.checkpointing import atomic
from megavlm.checkpointing.folder import MANIFEST

# Disk space for configuration, tokenizer and tables of contents, in addition to the weights.
_SPARE_BYTES = 50 * 10**6


@contextmanager
def output_folder(
    target: Path, *, sources: Iterable[Path], force: bool, mark: str, nbytes: int
) -> Iterator[Path]:
    """Yield a partial folder next to `target`, and rename it to `target` at the end.

    sources: folders that are read; none of them may be replaced. force: replace an older folder,
    but only if it holds a file that matches `mark`, so that a mistyped path does not delete a home
    directory. nbytes: size of the weights. After an error no output is left, and partial output of
    a killed conversion is removed by the next one. Raises ValueError if the folder may not be
    replaced, if another process is writing it, or if its disk has too little space.
    """
    target = _resolved(target)
    for path in (target, *target.parents):
        if path.is_file():
            raise ValueError(f"{path} is a file: name a folder.")
    if os.path.ismount(target):
        raise ValueError(f"{target} is a mount point and cannot be replaced: name a folder in it.")
    _check_sources(target, sources)
    if target.is_dir() and any(target.iterdir()):
        if not force:
            raise ValueError(f"{target} is not empty: choose another folder, or add --force.")
        if not any(target.glob(mark)):
            raise ValueError(f"{target} holds no {mark}: --force does not replace such a folder.")
    partial = atomic.partial_path(target)
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
    """Resolve links: a link is kept, and the folder to which it points is replaced."""
    try:
        return target.resolve()
    except RuntimeError as error:
        raise ValueError(f"{target} is a link to itself: name a folder.") from error


def _check_sources(target: Path, sources: Iterable[Path]) -> None:
    """Check that no source is in the target, and that the target is not in a step."""
    for source in sources:
        # A file may be a link to another place.
        for path in (source, *filter(Path.is_file, source.iterdir())):
            if path.resolve().is_relative_to(target):
                raise ValueError(
                    f"the input {path} is in {target} and would be deleted with it: choose "
                    f"another folder."
                )
        if (source / MANIFEST).is_file() and target.is_relative_to(source.resolve()):
            raise ValueError(f"{target} lies in a step of a checkpoint: choose another folder.")


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Lock the target, because a second conversion would remove the first one's partial folder."""
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
        raise ValueError(
            f"{target} needs {format_bytes(needed)}, but {format_bytes(free)} are free on its disk."
        )
