"""Folders and files that are either complete or absent, even after a kill or a power failure."""

import os
import shutil
from pathlib import Path
from typing import IO


def partial_path(target: Path) -> Path:
    """Return the path under which a file or folder is written before it is renamed."""
    return target.with_name(f".{target.name}.partial")


def replace_folder(target: Path) -> None:
    """Rename the partial folder to `target`. An existing `target` is moved away, then deleted."""
    # The contents must be on the disk before the rename: after a power failure, a folder with its
    # final name could otherwise lack data.
    sync_tree(partial_path(target))
    older = target.with_name(f".{target.name}.older")
    if older.exists():
        shutil.rmtree(older)
    if target.exists():
        target.rename(older)
    partial_path(target).rename(target)
    sync(target.parent)
    shutil.rmtree(older, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write or replace a small file atomically."""
    new = partial_path(path)
    try:
        new.write_text(text)
        sync(new)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    new.rename(path)
    sync(path.parent)


def remove_folder(target: Path) -> None:
    """Delete a folder. If the process is killed meanwhile, no partial folder has its name."""
    doomed = target.with_name(f".{target.name}.deleted")
    target.rename(doomed)
    sync(target.parent)
    shutil.rmtree(doomed)


def close_written(file: IO[bytes], *, is_whole: bool) -> None:
    """Close a new file, and flush it to the disk if it was written completely."""
    with file:
        if is_whole:
            file.flush()
            os.fsync(file.fileno())


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
