"""One trainer a run directory: a second would write the same records and checkpoints.

`flock` on RUN_DIR/.lock, held by rank 0 as long as it lives. The kernel lets go of it however the
process ends, so what a dead run left never stands in the way; the file's words only tell who holds
it. It works between the nodes of NFS (version 4, or 3 with its lock service) and of Lustre mounted
with `flock`. Not covered: Lustre mounted with `localflock`, which sees its own node alone.
"""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

LOCK_FILE = ".lock"

logger = logging.getLogger(__name__)


@contextmanager
def run_lock(run_dir: str | Path) -> Iterator[None]:
    """Holds the directory, which is made if need be. ValueError where another process does."""
    path = Path(run_dir, LOCK_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not _take(file, path):
            logger.warning(
                "%s cannot be locked on this file system: see to it that no other run uses %s.",
                path,
                run_dir,
            )
        started = datetime.now().astimezone().isoformat(" ", "seconds")
        file.truncate(0)
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": started}, file)
        file.flush()
        # A lock lives until the last copy of its descriptor is closed: a forked child, which may
        # outlive this process, keeps none. (Other programs get none anyway.)
        os.register_at_fork(after_in_child=file.close)
        yield


def check_free(run_dir: str | Path) -> None:
    """ValueError where a run holds the directory now. Leaves nothing behind."""
    path = Path(run_dir, LOCK_FILE)
    if path.is_file():
        with path.open("a+") as file:
            _take(file, path)


def _take(file: IO[str], path: Path) -> bool:
    """False on a file system without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"run.dir={path.parent} is in use by {_holder(path)}: stop that run, or choose another "
            "run.dir"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        return False
    return True


def _holder(path: Path) -> str:
    try:
        words = json.loads(path.read_text())
        return f"process {words['pid']} on {words['host']} since {words['started']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just begun
        return "another process"
