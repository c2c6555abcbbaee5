"""Messages between the trainer and a process with limits: JSON with a length prefix. JSON is used
instead of pickle because replies are untrusted. Bytes arrive as bytes; times and decimals, as text.
"""

import base64
import json
import socket
import struct
from collections.abc import Callable
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from megavlm.subprocess_pool.failure import CallFailure

HEAD = struct.Struct("!Q")
_BYTES = "\0bytes"  # no user's object has this key


def frame(message: Any) -> bytes:
    """Encode a message. Raises CallFailure for a value that JSON cannot hold."""
    body = _encoded(message, lambda data: {_BYTES: base64.b64encode(data).decode()})
    return HEAD.pack(len(body)) + body


def json_bytes(values: Any) -> bytes:
    """Encode values for a service or a program. Bytes become {"base64": ...}, times and decimals
    text. Raises CallFailure for a value that JSON cannot hold.
    """
    return _encoded(
        values, lambda data: {"base64": base64.b64encode(data).decode()}, allow_nan=False
    )


def _encoded(values: Any, of_bytes: Callable[[bytes], Any], *, allow_nan: bool = True) -> bytes:
    def default(value: Any) -> Any:
        if isinstance(value, bytes | bytearray | memoryview):
            return of_bytes(bytes(value))
        if isinstance(value, date | time | timedelta | Decimal | UUID):
            return str(value)
        raise TypeError(f"{value!r:.80} is a {type(value).__name__}, and JSON cannot hold it")

    try:
        return json.dumps(values, default=default, allow_nan=allow_nan).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CallFailure("value", f"a value cannot be sent: {error}") from error


def _decoded(body: bytes | bytearray) -> Any:
    return json.loads(body, object_hook=_bytes_of)


def _bytes_of(values: dict[str, Any]) -> Any:
    return base64.b64decode(values[_BYTES]) if values.keys() == {_BYTES} else values


def receive(control: socket.socket) -> Any:
    """Return the next message, or None at the end of the stream."""
    head = _exactly(control, HEAD.size)
    return None if head is None else _decoded(_exactly(control, HEAD.unpack(head)[0]) or b"null")


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
        value = _decoded(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise CallFailure("value", "a reply that is not JSON") from error
    if not isinstance(value, dict):
        raise CallFailure("value", "a reply that is not an object")
    return value
