"""Temporary folders, which a later process removes if theirs was killed."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LEFT_FOR = 60.0  # seconds: a process may be about to lock its folder


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder whose name begins with `prefix`, and remove it at the end. Folders that
    killed processes of this user left under the same prefix are removed first.
    """
    remove_leftovers(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        lock = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # on a file system without locks nobody removes any
                fcntl.flock(lock, fcntl.LOCK_SH)
            yield Path(folder)
        finally:
            os.close(lock)


def remove_leftovers(prefix: str) -> None:
    """Remove this user's temporary folders with a prefix that no process holds a lock on."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # it is in use, or somebody else has removed it
            stat = folder.lstat()
            if stat.st_uid != os.getuid() or time.time() - stat.st_ctime < LEFT_FOR:
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)
