"""What is slow to make and the same for many tests: made once for all tests, pytest-xdist workers
and sessions, and kept in the temporary directory.

    folder = cached_folder("model-qwen3_vl", sizes, lambda folder: make_tiny_model(folder, ...))
    expected = cached_value("logits", (folder.name, prompts), lambda: transformers_logits(...))

An entry belongs to a state of all code of the project and of the installed packages: any edit, and
any other version of a package, makes its own. The key says what else the result depends on; `repr`
of it must show that. Entries are for all: copy a folder before a test changes it.
"""

import hashlib
import os
import pickle
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

PROJECT = Path(__file__).resolve().parents[2]
KEPT = 24 * 3600  # seconds since a state of the code was last used


def cached_folder(name: str, key: object, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make(folder)` filled; `make` finds no folder there, its parent only.

    Only one process makes an entry, others wait for it. An entry appears whole (it is renamed from
    a temporary name) and is made anew if one of its files is missing or was changed since.
    """
    entry = _root() / f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
    listing = entry.with_name(f"{entry.name}.files")
    with FileLock(f"{entry}.lock"):
        if not (listing.exists() and listing.read_text() == _files(entry)):
            shutil.rmtree(entry, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=_root()) as scratch:
                made = Path(scratch) / name
                make(made)
                made.rename(entry)
            listing.write_text(_files(entry))
    return entry


def cached_value(name: str, key: object, make: Callable[[], Any]) -> Any:
    """Return what `make()` returned once, pickled: plain values, arrays, tensors."""

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "value.pickle").write_bytes(pickle.dumps(make()))

    path = cached_folder(name, key, write) / "value.pickle"
    return pickle.loads(path.read_bytes())  # noqa: S301 (a file of our own)


@cache
def _root() -> Path:
    """Return the folder of this state of the code; delete those that have not been used lately."""
    root = Path(tempfile.gettempdir()) / f"megavlm-tests-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    assert root.stat().st_uid == os.getuid(), f"{root} belongs to another user; delete it"
    mine = root / code_digest()
    mine.mkdir(exist_ok=True)
    os.utime(mine)
    with FileLock(root / "delete.lock"):
        for other in root.iterdir():
            if other.is_dir() and other.stat().st_mtime < time.time() - KEPT:
                shutil.rmtree(other, ignore_errors=True)
    return mine


def code_digest(project: Path = PROJECT) -> str:
    """Return a digest of the project's code, of Python and of the packages' versions."""
    digest = hashlib.sha256(sys.version.encode())
    packages = Path(sysconfig.get_path("purelib")).glob("*.dist-info")
    digest.update(repr(sorted(path.name for path in packages)).encode())
    for package in ("megavlm", "checkpoint_tools", "tests"):
        for path in sorted((project / package).rglob("*.py")):
            digest.update(repr((str(path.relative_to(project)), path.read_bytes())).encode())
    return digest.hexdigest()[:16]


def _files(entry: Path) -> str:
    """Return name, size and time of change of each file, one a line."""
    stats = [(path.relative_to(entry), path.stat()) for path in sorted(entry.rglob("*"))]
    return "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
