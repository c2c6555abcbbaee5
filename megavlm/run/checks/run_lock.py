"""Lock of a run directory, so that two trainers cannot write the same records and checkpoints.

Rank 0 holds `flock` on RUN_DIR/.lock while it runs. The kernel releases the lock however the
process ends, so a dead run never blocks the next one; the file's text only names the holder. The
lock works between nodes on NFS (version 4, or version 3 with its lock service) and on Lustre
mounted with `flock`. Not covered: Lustre mounted with `localflock`, because it locks within one
node only.
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

from megavlm.writing import naming

LOCK_FILE = ".lock"

logger = logging.getLogger(__name__)


@contextmanager
def run_lock(run_dir: str | Path) -> Iterator[None]:
    """Hold the directory's lock; the directory is created if needed.

    Raises ValueError if another process holds it.
    """
    path = Path(run_dir, LOCK_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not _take(file, path):
            logger.warning(
                "%s cannot be locked on this file system: make sure that no other run uses %s.",
                path,
                run_dir,
            )
        started = datetime.now().astimezone().isoformat(" ", "seconds")
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        with naming(path):
            file.truncate(0)
            os.write(file.fileno(), json.dumps(holder).encode())  # or closing would write it again
        # A lock is held until the last copy of its descriptor is closed, and a forked child may
        # outlive this process. So the child closes its copy. Programs started by exec inherit none.
        os.register_at_fork(after_in_child=file.close)
        yield


def check_free(run_dir: str | Path) -> None:
    """Raise ValueError if a run is using the directory now. Creates no file."""
    path = Path(run_dir, LOCK_FILE)
    if path.is_file():
        with path.open("a+") as file:
            _take(file, path)


def _take(file: IO[str], path: Path) -> bool:
    """Lock the file. Returns False on a file system without locks."""
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
    except (OSError, ValueError, KeyError, TypeError):  # the holder has not written the text yet
        return "another process"
