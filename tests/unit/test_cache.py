"""Shared results of tests: made once, whole, and never of other code."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cache
from tests.support.cache import cached_folder, code_digest


@pytest.fixture(autouse=True)
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the cache start empty, in the test's own folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._root.cache_clear()
    yield
    cache._root.cache_clear()


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "made").write_text(str(time.monotonic_ns()))


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
