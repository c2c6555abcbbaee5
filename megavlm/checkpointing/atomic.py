"""Folders and files that are complete or not there at all, also after a kill or a power cut."""

import os
import shutil
from pathlib import Path


def partial(target: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return target.with_name(f".{target.name}.partial")


def replace_folder(target: Path) -> None:
    """Gives the partial folder its name. An older folder of that name steps aside, then goes."""
    sync_tree(partial(target))
    older = target.with_name(f".{target.name}.older")
    if older.exists():
        shutil.rmtree(older)
    if target.exists():
        target.rename(older)
    partial(target).rename(target)
    sync(target.parent)
    shutil.rmtree(older, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a small file."""
    new = partial(path)
    try:
        new.write_text(text)
        sync(new)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    new.rename(path)
    sync(path.parent)


def remove_folder(target: Path) -> None:
    """All of it, or (killed) nothing that has its name."""
    doomed = target.with_name(f".{target.name}.deleted")
    target.rename(doomed)
    sync(target.parent)
    shutil.rmtree(doomed)


def sync_tree(folder: Path) -> None:
    """Everything in the folder, and the folder, on the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
