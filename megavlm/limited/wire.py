"""Messages between the trainer and a process with limits: JSON with a length prefix. JSON is used
instead of pickle because replies are untrusted.
"""

import json
import socket
import struct
from typing import Any

from megavlm.limited.failure import CallFailure

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


class Replies:
    """Replies of a process, as their bytes arrive."""

    def __init__(self, max_reply: int) -> None:
        """max_reply: Limit of a reply in bytes."""
        self._max_reply, self._received = max_reply, bytearray()

    def add(self, data: bytes) -> list[dict[str, Any]]:
        """Return the replies that `data` completes. Raises CallFailure for a reply that is too
        large or not an object.
        """
        self._received += data
        found = []
        while len(self._received) >= HEAD.size:
            (size,) = HEAD.unpack_from(self._received)
            if size > self._max_reply:
                raise CallFailure("value", f"a reply of {size} bytes")
            end = HEAD.size + size
            if len(self._received) < end:
                break
            found.append(_parse(self._received[HEAD.size : end]))
            del self._received[:end]
        return found


def _parse(body: bytearray) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise CallFailure("value", "a reply that is not JSON") from error
    if not isinstance(value, dict):
        raise CallFailure("value", "a reply that is not an object")
    return value
