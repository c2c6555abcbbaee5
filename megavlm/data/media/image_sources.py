"""Encoded images and video files from the cells of a column.

A cell holds bytes, a path relative to the data file, base64, a data: URL, an http(s) URL, or a
struct of bytes, path, url or base64.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote_to_bytes

from megavlm.data.media.fetch import check_url, fetch
from megavlm.data.tables.files import find_filesystem, has_protocol, read_safely

Kind = Literal["image", "video", "audio"]

MAX_FILE_BYTES = 2**26  # limit of an encoded image
MAX_VIDEO_BYTES = 2**28  # limit of a video file

# Base64 of PNG, JPEG, GIF, WEBP and BMP. It cannot be confused with a path: a path of this form
# would be over 40 characters long and have no dot.
_BASE64 = re.compile(r"(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk)[A-Za-z0-9+/\s]{40,}={0,2}\s*")
_A = {"image": "an image", "video": "a video", "audio": "a clip of audio"}
_SOURCES = ("bytes", "path", "url", "base64")  # the first one that is there is read
# Hints to OpenAI's servers and caches. They do not change what the model sees.
IGNORED = ("detail", "cache_control", "annotations")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


@dataclass(frozen=True)
class DataFolder:
    """Folder of a data file, or the folder's URL, to which paths of images and videos are
    relative.
    """

    folder: str

    def read(self, name: str, kind: Kind = "image") -> bytes:
        """Read a file. Raises ValueError for a path that leaves the folder or does not exist, and
        errors as `read_safely` does.
        """
        read = self._read_remote if has_protocol(self.folder) else self._read_local
        return read_safely(f"no {kind} at {name!r} beside the data", lambda: read(name, kind))

    def _read_local(self, name: str, kind: Kind) -> bytes:
        folder = Path(self.folder).resolve()
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            raise _leaves(name, kind)
        if not path.is_file():
            raise ValueError(f"no {kind} at {path}")
        _check_size(path.stat().st_size, kind)
        return path.read_bytes()

    def _read_remote(self, name: str, kind: Kind) -> bytes:
        if name.startswith("/") or ".." in name.split("/") or "::" in name:
            raise _leaves(name, kind)
        filesystem, path = find_filesystem(f"{self.folder}/{name}")
        size = filesystem.size(path)
        if size is not None:
            _check_size(size, kind)
        return filesystem.cat_file(path)


def media_bytes(value: object, folder: DataFolder, kind: Kind = "image") -> bytes:
    """Return the encoded image or the video file of a cell, without decoding it. Raises ValueError
    for a cell without one, and for a struct with a key that is not read.
    """
    content = _content(value, kind)
    if isinstance(content, str) and content:
        return _of_text(content, folder, kind)
    if not isinstance(content, bytes):
        raise ValueError(f"{_A[kind]} has neither bytes nor a path: {value!r:.80}")
    _check_size(len(content), kind)
    return content


def check_keys(struct: Mapping[str, Any], known: Sequence[str], kind: Kind) -> None:
    """Raise ValueError for a key of a struct that has a value but is not read."""
    for key, value in struct.items():
        if key not in (*known, *IGNORED) and value is not None:
            raise ValueError(
                f"{_A[kind]} has the key {key!r} ({value!r:.80}), but only these are read: "
                f"{', '.join(known)}; remove the key, or store the {kind} as the model should see "
                "it (frames are sampled and resized by data.video_fps, data.video_max_frames, "
                "data.video_max_pixels and data.max_pixels)"
            )


def is_url(value: object, kind: Kind = "image") -> bool:
    """Return True if the image or video must be fetched over http(s). Raises ValueError for a URL
    that `check_url` refuses, and for a struct with a key that is not read.
    """
    content = _content(value, kind)
    if isinstance(content, str) and content[:8].lower().startswith(("http://", "https://")):
        check_url(content)
        return True
    return False


def _content(value: object, kind: Kind) -> object:
    if isinstance(value, dict):
        named = next((key for key in _SOURCES if value.get(key)), None)
        if named is None:
            return None
        check_keys(value, _SOURCES, kind)
        content = value[named]
        if named == "base64" and isinstance(content, str) and not content.startswith("data:"):
            return f"data:;base64,{content}"
        return content
    return value


def _of_text(text: str, folder: DataFolder, kind: Kind) -> bytes:
    scheme = _SCHEME.match(text)
    name = scheme[1].lower() if scheme else ""
    if name == "data":
        return _data_url(text, kind)
    if name in ("http", "https"):
        return fetch(text)
    if scheme and text[scheme.end() :].startswith("/"):
        raise ValueError(
            f"{_A[kind]} at {text[:80]!r}: only http, https and data URLs are read; use a path "
            "beside the data file"
        )
    if _BASE64.fullmatch(text):
        return _base64(text, kind)
    return folder.read(text, kind)


def _data_url(text: str, kind: Kind) -> bytes:
    head, comma, body = text.partition(",")
    if not comma:
        raise ValueError("a data: URL has no comma, so no content")
    return _base64(body, kind) if head.lower().endswith(";base64") else unquote_to_bytes(body)


def _base64(text: str, kind: Kind) -> bytes:
    _check_size(len(text) // 2, kind)  # at least half of a text with line breaks is content
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{_A[kind]}'s base64 is broken ({error})") from error


def _leaves(name: str, kind: Kind) -> ValueError:
    return ValueError(
        f"{kind} path {name!r} leaves the data file's folder; use a path inside it, or store the "
        f"{kind}'s bytes"
    )


def _check_size(size: int, kind: Kind) -> None:
    limit = MAX_FILE_BYTES if kind == "image" else MAX_VIDEO_BYTES
    if size > limit:
        raise ValueError(f"{_A[kind]}'s file has {size} bytes, more than the limit of {limit}")
