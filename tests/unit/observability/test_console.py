"""What a run prints fits its width and says what it found."""

import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megavlm.observability.console import WIDTH, legend, print_closing, step_line
from megavlm.observability.result import build_result
from megavlm.observability.text import duration, number, percent, points, short_names, visible

from .runs import evaluation, measure, metrics, write_run


def printed(result: dict[str, Any]) -> str:
    console = Console(file=StringIO(), width=WIDTH)
    print_closing(result, [(step, step / 10) for step in range(1, 6)], console)
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_a_step_of_reinforcement_learning() -> None:
    assert step_line(7, 40, metrics(7) | {"truncated_share": 0.03}) == (
        "step  7/40  reward 0.700  correct 70%  length 2.0  cut off 3%  no signal 25%  KL 0.0070"
        "  gradient 0.80  2.0s  6.0k tok/s"
    )


def test_a_supervised_step() -> None:
    names = ("loss", "gradient_norm", "learning_rate", "seconds/total", "tokens_per_second")
    line = step_line(7, 300, {name: metrics(7)[name] for name in names})
    assert line == "step   7/300  loss 0.0100  gradient 0.80  lr 5e-4  2.0s  6.0k tok/s"


@given(st.lists(st.floats(), min_size=len(metrics(1)), max_size=len(metrics(1))))
def test_a_line_fits_whatever_it_shows(values: list[float]) -> None:
    shares = ("reward", "accuracy", "truncated_share", "groups_without_signal")
    shown = dict(zip(metrics(1), values, strict=True)) | dict.fromkeys(shares, -0.123)
    line = step_line(99_999, 100_000, shown)
    assert len(line) <= WIDTH and "\n" not in line and line.endswith("tok/s")


def test_the_legend_explains_every_word_of_a_line() -> None:
    text = legend(metrics(7))
    assert max(map(len, text.splitlines())) <= WIDTH
    joined = " ".join(text.split())
    for word in ("reward", "cut off", "no signal", "KL", "mismatch", "gradient", "tok/s"):
        assert f"{word}: " in joined
    assert "loss: " not in joined, "it is not in the line"
    assert "loss: " in legend({"loss": 0.1})


@given(st.floats())
def test_a_number_takes_at_most_seven_characters_and_a_sign(value: float) -> None:
    assert len(number(value).removeprefix("-")) <= 7 or math.isinf(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-6, "1e-6"),
        (0.00123, "0.00123"),
        (0.5, "0.500"),
        (12.34, "12.3"),
        (999.9, "1.0k"),
        (6400.0, "6.4k"),
        (12_345.0, "12k"),
        (2e9, "2e9"),
        (-0.5, "-0.500"),
        (None, "nan"),
    ],
)
def test_numbers_as_people_read_them(value: float | None, text: str) -> None:
    assert number(value) == text


def test_shares_points_and_durations() -> None:
    assert (percent(0.954), percent(None), points(0.288), points(-0.01)) == (
        "95.4 %",
        "-",
        "+28.8",
        "-1.0",
    )
    assert [duration(s) for s in (1.26, 59.99, 245, 11_520)] == [
        "1.3 s",
        "60.0 s",
        "4 min 05 s",
        "3 h 12 min",
    ]


def test_the_closing_tables_hold_every_measure(tmp_path: Path) -> None:
    write_run(tmp_path)
    long_path = "/" + "long/" * 40 + "end"
    result = build_result(tmp_path, steps=5, seed=3, paths={"report": long_path})
    text = printed(result)
    for expected in ("seed 3", "colour", "count", "50.0", "90.0", "+40.0", "77.0", "98.0"):
        assert expected in text
    for expected in ("31.0", "30.0", "rollout", "update", "evaluation", "this is visual"):
        assert expected in text
    assert "80.0 % to 100.0 %" in text, "the interval of the last accuracy"
    assert "Reward per step" in text and "step 1" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    table = text[text.index("category") : text.index("interval")]
    assert max(map(len, map(str.rstrip, table.splitlines()))) <= 80, "a log is narrow"
    # A path is there to be copied: all of it, whatever the width.
    assert long_path in "".join(line.strip() for line in text.splitlines())


def test_markup_in_a_category_is_text(tmp_path: Path) -> None:
    after = evaluation(0.9) | {"greedy": measure(**{"[red]x[/red]": 0.9})}
    write_run(tmp_path, after=after)
    assert "[red]x[/red]" in printed(build_result(tmp_path, steps=5, seed=0))


def test_a_run_without_evaluation_still_closes(tmp_path: Path) -> None:
    result = build_result(tmp_path, steps=5, seed=0, extra_seconds={"server start": 3.0})
    assert "server start" in printed(result)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["runs/mine/checkpoints"], ["mine/checkpoints"]),
        (
            ["/home/me/runs/mine/checkpoints/step_40", "models/Qwen2.5-VL-3B-Instruct/"],
            ["mine/checkpoints/step_40", "Qwen2.5-VL-3B-Instruct"],
        ),
        (["a/x/model", "b/x/model"], ["a/x/model", "b/x/model"]),
        (["model", "model"], ["model", "model"]),
        (["hf", "/"], ["hf", "/"]),
    ],
)
def test_models_have_short_names_that_differ(names: list[str], short: list[str]) -> None:
    assert short_names(names) == short


def test_what_a_page_would_not_show_is_an_escape() -> None:
    assert visible("a\x00b\ufffd\u200b\n\té 漢 🙂") == "a\\x00b\\ufffd\\u200b\n\té 漢 🙂"


def test_categories_that_rows_do_not_have_are_no_nameless_row(tmp_path: Path) -> None:
    def first_cells(name: str, **shares: float) -> list[str]:
        write_run(tmp_path / name, after=evaluation(0.9) | {"greedy": measure(**shares)})
        text = printed(build_result(tmp_path / name, steps=5, seed=0))
        table = text[text.index("category") : text.index("95 % interval")]
        return [line.split()[0] for line in table.splitlines() if line.strip()][2:]

    assert first_cells("some", **{"": 0.5, "count": 0.9}) == ["(none)", "count", "all"]
    assert first_cells("none", **{"": 0.5}) == ["all"]
