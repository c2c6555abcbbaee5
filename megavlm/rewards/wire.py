"""Messages between the trainer and a reward process: JSON behind its length. JSON and not pickle,
because what comes back was made beside code and text that nobody vouches for.
"""

import json
import socket
import struct
from typing import Any

HEAD = struct.Struct("!Q")


def frame(message: Any) -> bytes:
    """Columns that JSON has no form for (times, bytes) go as text."""
    body = json.dumps(message, default=str).encode()
    return HEAD.pack(len(body)) + body


def receive(control: socket.socket) -> Any:
    """The next message; None at the end of the stream."""
    head = _exactly(control, HEAD.size)
    return None if head is None else json.loads(_exactly(control, HEAD.unpack(head)[0]) or b"null")


def _exactly(control: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        data = control.recv(min(size - len(parts), 1 << 20))
        if not data:
            return None
        parts += data
    return bytes(parts)
