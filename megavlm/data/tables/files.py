"""Files of data sets, on this machine or at any URL that fsspec supports (s3://, gs://, ...)."""

import errno
import gzip
import hashlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import fsspec
from fsspec.registry import known_implementations

from megavlm.demo_folder import demo_command

_GZIP = ".gz"
_TEXTS = (".jsonl", ".json", ".csv")
SUFFIXES = (".parquet", *_TEXTS, *(suffix + _GZIP for suffix in _TEXTS))
# Files up to this size are hashed whole; of a larger file, evenly spread parts and the end are.
WHOLE_BYTES = 2**28
_PART = 2**20
_NUM_PARTS = 64
# Errors of a file system rather than of a file: a server restarts, a mount is slow to come back.
FILE_SYSTEM_ERRORS = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EREMOTEIO,
}
PAUSES = (1.0, 5.0, 30.0)  # seconds before each new attempt

T = TypeVar("T")


def read_safely(what: str, read: Callable[[], T]) -> T:
    """Return `read()`, retried after errors of the file system.

    Such an error says nothing about the data. If it persists, it is raised as an OSError, so that
    no row is skipped because of it. Any other OSError becomes a ValueError whose message starts
    with `what`.
    """
    for pause in (*PAUSES, None):
        try:
            return read()
        except OSError as error:
            if error.errno not in FILE_SYSTEM_ERRORS:
                raise ValueError(f"{what} ({error})") from error
            if pause is None:
                message = f"{what}, tried {len(PAUSES) + 1} times ({error.strerror})"
                raise OSError(error.errno, message) from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True)
class DataFile:
    """A file of a data set."""

    url: str  # path or URL as in the recipe, with globs expanded
    entry: int  # number of its data set among the recipe's entries
    dataset: str  # name of its data set

    @property
    def suffix(self) -> str:
        """Suffix in lower case, without the suffix of a compression: ".json" for X.json.gz."""
        return Path(self.url[: -len(_GZIP)] if self.is_compressed else self.url).suffix.lower()

    @property
    def is_compressed(self) -> bool:
        return self.url.lower().endswith(_GZIP)

    @property
    def folder(self) -> str:
        """Folder or its URL, to which image paths are relative."""
        head, slash, _ = self.url.rpartition("/")
        return head if slash else "."

    def open(self) -> IO[bytes]:
        """Open the file for reading. Raises errors as `read_safely` does."""
        filesystem, path = find_filesystem(self.url)
        return read_safely(f"{self.url}: cannot be read", lambda: filesystem.open(path, "rb"))

    @contextmanager
    def content(self) -> Iterator[IO[bytes]]:
        """Open the file for reading, decompressed. Raises errors as `read_safely` does, and
        ValueError for a file whose name ends in .gz that is not a complete gzip file.

        Seeking in a compressed file decompresses it up to the new position.
        """
        with self.open() as stream:
            if not self.is_compressed:
                yield stream
                return
            try:
                with gzip.GzipFile(fileobj=stream) as unpacked:
                    yield cast(IO[bytes], unpacked)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{self.url}: not a whole gzip file ({error})") from error

    def digest(self) -> str:
        """Return the SHA-256 of the content. For files above WHOLE_BYTES it covers the size, evenly
        spread parts and the end, where Parquet keeps the sizes and statistics of all columns. A
        change of a few bytes in the middle of such a file may go unnoticed.
        """
        digest = hashlib.sha256()
        with self.open() as file:
            size = file.seek(0, 2)
            digest.update(f"{size}:".encode())
            for start, length in _parts(size):
                file.seek(start)
                while length > 0 and (chunk := file.read(min(length, _PART))):
                    digest.update(chunk)
                    length -= len(chunk)
        return digest.hexdigest()


def has_protocol(url: str) -> bool:
    return "://" in url or "::" in url


def find_filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL or path, and the path in it.

    Do not keep a file system across a fork: it belongs to the process that created it. Raises
    ValueError for a protocol that is unknown, or whose package is not installed.
    """
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        protocol = fsspec.utils.get_protocol(url)
        hint = known_implementations.get(protocol, {}).get("err") or f"its package ({error})"
        raise ValueError(f"{url}: {protocol}:// needs a package that is missing: {hint}") from error
    except ValueError as error:
        raise ValueError(f"{url}: fsspec does not know this kind of address ({error})") from error


def expand(entries: Sequence[str]) -> list[DataFile]:
    """Return the files of a recipe's entries. An entry is a file or a glob (*, ?, [...]). Each is
    one data set, named after its folder and its name without suffix: "photos/train".

    Raises ValueError for an entry without files, and for a file whose name has none of SUFFIXES.
    """
    files = []
    for number, entry in enumerate(entries):
        filesystem, path = find_filesystem(entry)
        if any(mark in path for mark in "*?["):
            found = sorted(filesystem.glob(path))
            urls = [filesystem.unstrip_protocol(p) if has_protocol(entry) else p for p in found]
        else:
            urls = [entry] if filesystem.exists(path) else []
        if not urls:
            command = demo_command(entry)
            how = f"make it by {command}" if command else "give Parquet, JSONL, JSON or CSV files"
            raise ValueError(f"{entry}: no such data file; {how}")
        for url in urls:
            file = DataFile(url, number, _name(entry, url))
            if not url.lower().endswith(SUFFIXES):
                raise ValueError(
                    f"{url}: not a data file by its name; it must end in {', '.join(SUFFIXES)}"
                )
            files.append(file)
    return files


def _name(entry: str, url: str) -> str:
    """Return the name of a data set: the file's folder, and the entry without suffix."""
    folder = url.split("://")[-1].strip("/").split("/")[-2:-1]
    name = entry.rpartition("/")[2]
    name = name[: -len(_GZIP)] if name.lower().endswith(_GZIP) else name
    return "/".join([*folder, name.rpartition(".")[0]])


def _parts(size: int) -> list[tuple[int, int]]:
    """Return (start, length) in bytes of the parts of a file that are hashed."""
    if size <= WHOLE_BYTES:
        return [(0, size)]
    last = size - _PART
    return [(last * index // (_NUM_PARTS - 1), _PART) for index in range(_NUM_PARTS)]
