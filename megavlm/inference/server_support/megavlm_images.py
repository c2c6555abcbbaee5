"""Sharing of image pixels between the ranks' requests, in the first process of a server.

For n responses to a prompt SGLang sends its ranks n + 1 requests, and writes the pixels to shared
memory for each: 25 MB and 23 ms of CPU time for an image of one megapixel. Here each request after
the first gets a hard link to the same file. As before, a rank removes the name in its request; the
file is freed with its last name.
"""

import os
import secrets
import weakref
from typing import Any

from sglang.srt.managers.mm_utils import ShmPointerMMData

FOLDER = "/dev/shm"  # noqa: S108


def install() -> None:
    """Make SGLang write a tensor to shared memory only once while the tensor exists."""
    write = ShmPointerMMData.__init__
    written: dict[int, dict[str, Any]] = {}  # id of a tensor -> attributes of a pointer to it

    def point(self: Any, tensor: Any, *arguments: Any, **keywords: Any) -> None:
        if (known := written.get(id(tensor))) is not None:
            vars(self).update(known, shm_name=_link(known["shm_name"]))
            return
        write(self, tensor, *arguments, **keywords)
        name = _link(self.shm_name)
        written[id(tensor)] = {**vars(self), "shm_name": name}
        weakref.finalize(tensor, forget, id(tensor), name)

    def forget(tensor_id: int, name: str) -> None:
        del written[tensor_id]
        os.unlink(f"{FOLDER}/{name}")

    ShmPointerMMData.__init__ = point


def _link(name: str) -> str:
    """Create a hard link whose name contains this process's id, as SGLang's shared-memory names
    do.
    """
    new = f"sgl_shm_mm_{os.getpid()}_{secrets.token_hex(4)}"
    os.link(f"{FOLDER}/{name}", f"{FOLDER}/{new}")
    return new
