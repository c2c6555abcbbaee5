"""Shared results of tests: made once, whole, and never of other code."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cache
from tests.support.cache import cached_folder, cached_value, code_digest


@pytest.fixture(autouse=True)
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the cache start empty, in the test's own folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._root.cache_clear()
    yield tmp_path / f"megavlm-tests-{os.getuid()}"
    cache._root.cache_clear()


def write(folder: Path) -> None:
    time.sleep(0.2)  # both processes are here together, if nothing hinders them
    folder.mkdir()
    (folder / "made").write_text(str(time.monotonic_ns()))


def test_it_is_made_once_for_each_key() -> None:
    first = cached_folder("x", ("a", 1), write)
    text = (first / "made").read_text()
    assert cached_folder("x", ("a", 1), write) == first
    assert (first / "made").read_text() == text
    assert cached_folder("x", ("a", 2), write) != first
    assert cached_folder("y", ("a", 1), write) != first


def test_processes_that_ask_together_get_the_same() -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        texts = pool.map(read_of_shared, range(2), chunksize=1)
    assert texts[0] == texts[1]


def read_of_shared(_: int) -> str:
    return (cached_folder("shared", "", write) / "made").read_text()


def test_what_failed_half_way_is_not_there() -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        cached_folder("x", "", fail)
    made = cached_folder("x", "", write)
    assert sorted(path.name for path in made.iterdir()) == ["made"]


@pytest.mark.parametrize("damage", ["change", "delete", "add"])
def test_a_damaged_entry_is_made_anew(damage: str) -> None:
    made = cached_folder("x", "", write)
    if damage == "change":
        (made / "made").write_text("5")
    elif damage == "delete":
        (made / "made").unlink()
    else:
        (made / "more").touch()
    cached_folder("x", "", write)
    assert sorted(path.name for path in made.iterdir()) == ["made"]
    assert (made / "made").read_text() != "5"


def test_values() -> None:
    values = iter(([1, {"a": 2.5}], "another"))
    first = cached_value("x", "", lambda: next(values))
    assert first == cached_value("x", "", lambda: next(values)) == [1, {"a": 2.5}]
    assert cached_value("x", "other", lambda: next(values)) == "another"


def test_an_edit_anywhere_in_the_project_is_another_state(tmp_path: Path) -> None:
    files = [
        tmp_path / package / "sub/a.py" for package in ("megavlm", "checkpoint_tools", "tests")
    ]
    for path in files:
        path.parent.mkdir(parents=True)
        path.write_text("x = 1")
    digests = [code_digest(tmp_path)]
    for path in files:
        path.write_text("x = 2")
        digests.append(code_digest(tmp_path))
    files[0].rename(files[0].with_name("b.py"))
    digests.append(code_digest(tmp_path))
    assert len(set(digests)) == 5
    assert digests[-1] == code_digest(tmp_path)


def test_states_that_nobody_uses_are_deleted(own_root: Path) -> None:
    (own_root / "old/entry").mkdir(parents=True)
    (own_root / "fresh").mkdir()
    os.utime(own_root / "old", (0, 0))
    cached_folder("x", "", write)
    assert (own_root / "fresh").exists() and not (own_root / "old").exists()
