"""Files in memory that other processes on this machine can read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def shared_file(*parts: Any, size: int = 0) -> Iterator[str]:
    """Write bytes or buffers to a file in memory, and yield its path. Processes of the same user
    can open it within the context. size: Bytes of the file, if it is larger than its content.

    The file is not in any file system, so that nothing is left behind if this process is killed.
    """
    with open(os.memfd_create("megavlm"), "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.truncate(file.fileno(), max(size, file.tell()))
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
