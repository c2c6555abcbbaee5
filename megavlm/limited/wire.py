"""Messages between the trainer and a process with limits: JSON with a length prefix. JSON is used
instead of pickle because replies are untrusted.
"""

import json
import socket
import struct
from typing import Any

HEAD = struct.Struct("!Q")


def frame(message: Any) -> bytes:
    """Encode a message. Values that JSON does not support (times, bytes) become text."""
    body = json.dumps(message, default=str).encode()
    return HEAD.pack(len(body)) + body


def receive(control: socket.socket) -> Any:
    """Return the next message, or None at the end of the stream."""
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
