"""Transfer of played groups between two processes of a run. Tokens, log-probs and pixels are in one
shared-memory file, everything else in one pickle. The file has no name, so that nothing is left
behind when a process dies.
"""

import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from megavlm.data.rows import Row
from megavlm.data.tensor_pickle import TensorPickler, dumps, parts
from megavlm.rollout.trajectory import Group

PackedGroups = tuple[bytes, list[int], int]  # pickle, bytes of each array, descriptor


def send_groups(connection: Connection, groups: Sequence[Group], pid: int) -> None:
    """Send groups to process `pid` at the other end. Their rows are sent without encoded images and
    videos.
    """
    skeleton, contents = dumps(list(groups), _GroupPickler)
    sizes = [content.nbytes for content in contents]
    descriptor = os.memfd_create("megavlm_groups")
    try:
        # At least one byte, because an empty file cannot be mapped.
        os.ftruncate(descriptor, max(sum(sizes), 1))
        with mmap.mmap(descriptor, 0) as memory:
            for content in contents:
                memory.write(content)
        connection.send((skeleton, sizes))
        reduction.send_handle(connection, descriptor, pid)
    finally:
        os.close(descriptor)


def receive_groups(connection: Connection) -> PackedGroups:
    """Receive packed groups from `send_groups`; `unpack_groups` unpacks them."""
    skeleton, sizes = connection.recv()
    return skeleton, sizes, reduction.recv_handle(connection)


def unpack_groups(packed: PackedGroups) -> list[Group]:
    """Unpack groups. Arrays are views of the shared memory; it is freed with the last of them."""
    skeleton, sizes, descriptor = packed
    memory = memoryview(mmap.mmap(descriptor, 0))
    os.close(descriptor)
    # The pickle is trusted: a process that this one started sent it through a private pipe.
    groups: list[Group] = pickle.loads(skeleton, buffers=parts(memory, sizes))  # noqa: S301
    return groups


class _GroupPickler(TensorPickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Row) and (value.images or value.videos or value.extra):
            return replace(value, images=(), videos=(), extra={}).__reduce_ex__(5)
        return super().reducer_override(value)
