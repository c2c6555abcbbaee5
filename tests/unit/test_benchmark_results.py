"""Commands replace their own part of the benchmarks' results, and nothing else."""

from pathlib import Path

import pytest

from tests.benchmarks.results import RESULTS, replace_part


def test_a_part_is_replaced_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("a\n\n<!-- x -->\nold\n<!-- end of x -->\n\n<!-- y -->\n<!-- end of y -->\nb\n")
    for text in (r"| \1 new |", "| newer |\n"):
        replace_part("x", text, path)
        begin, kept = path.read_text().split("<!-- end of x -->")
        assert begin == f"a\n\n<!-- x -->\n\n{text.strip()}\n\n"
        assert kept == "\n\n<!-- y -->\n<!-- end of y -->\nb\n"


def test_a_part_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("a\n")
    with pytest.raises(AssertionError, match="has no part x"):
        replace_part("x", "", path)


@pytest.mark.parametrize("name", ["bench-trl", "cost"])
def test_the_page_has_the_parts_that_are_written(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "RESULTS.md"
    copy.write_text(RESULTS.read_text(encoding="utf-8"))
    replace_part(name, "one line", copy)
    assert f"<!-- {name} -->\n\none line\n\n<!-- end of {name} -->" in copy.read_text()
