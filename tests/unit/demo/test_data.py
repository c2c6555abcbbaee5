"""The demo on a set that it did not draw: captions from its rows, answers withheld, tests apart."""

from pathlib import Path
from typing import Any

import pytest

from megavlm.demo import pipeline
from megavlm.demo.data import CAPTION, take_data
from tests.conftest import png, read_rows, write_rows

COLOUR, SHAPE, THERE = "<image>Colour?", "<image>Shape?", "<image>Is there a circle?"


def example(side: int, problem: str, answer: str) -> dict[str, Any]:
    image = {"bytes": png(side, side), "path": None}
    return {"images": [image], "problem": problem, "answer": answer, "task": "any"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three images by side; colours and shapes have three answers each, the last question two."""
    rows = [example(28 * k, COLOUR, c) for k, c in ((1, "red"), (2, "blue"), (3, "green"))]
    rows += [example(28 * k, SHAPE, s) for k, s in ((1, "circle"), (2, "square"), (3, "cone"))]
    rows += [example(28, COLOUR, "red"), example(28, THERE, "yes"), example(56, THERE, "no")]
    folder = tmp_path / "source"
    folder.mkdir()
    write_rows(folder / "train.parquet", rows)
    write_rows(folder / "test.parquet", rows[:2])
    return folder


def test_captions_tell_what_rows_say_and_questions_withhold_it(
    source: Path, tmp_path: Path
) -> None:
    data = take_data(source, tmp_path / "data", seed=0)
    assert (data.train, data.test) == (source / "train.parquet", source / "test.parquet")
    rows = read_rows([str(data.warm_start)], category_key=data.category_key)
    captions = {row.images[0]: row.answer for row in rows if row.problem == CAPTION}
    # The rarer answer first, then the alphabet; "yes" and "no" are no part of it.
    assert captions == {
        png(28, 28): "circle red",
        png(56, 56): "blue square",
        png(84, 84): "cone green",
    }
    questions = [row for row in rows if row.problem != CAPTION]
    assert len(questions) == len(captions)
    known = {COLOUR: {"red", "blue", "green"}, SHAPE: {"circle", "square", "cone"}}
    for row in questions:
        assert row.answer in known.get(row.problem, {"yes", "no"})


def test_withheld_answers_say_nothing_of_the_image(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    colours = ("red", "blue", "green")
    rows = [example(28 + k, COLOUR, colours[k % 3]) for k in range(300)]
    write_rows(folder / "train.parquet", rows)
    data = take_data(folder, tmp_path / "data", seed=0)
    warm = read_rows([str(data.warm_start)], category_key=data.category_key)
    true = {row["images"][0]["bytes"]: row["answer"] for row in rows}
    questions = [row for row in warm if row.problem != CAPTION]
    agreeing = sum(true[row.images[0]] == row.answer for row in questions)
    assert 0.2 * len(questions) < agreeing < 0.47 * len(questions), "a third by chance"
    train = read_rows([str(data.train)])
    test = read_rows([str(data.test)])
    assert len(train) + len(test) == 300 and len(test) == 30, "a tenth is held out"


def test_no_train_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no train\.parquet"):
        take_data(tmp_path, tmp_path / "data", seed=0)


def test_a_folder_that_is_no_earlier_demo_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not an earlier demo"):
        pipeline.run_demo(pipeline.DemoOptions(run_dir=tmp_path))
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("algorithm", "data", "sentence"),
    [
        (
            "zom",
            None,
            r"--algorithm zom \(ALGORITHM or ENV of make demo\) has no recipe: did you mean zoom\? "
            "Otherwise choose one of .*cispo, dapo,",
        ),
        ("ppo", Path("mine"), "leave it out, or give the keys of recipes/algorithms/ppo.yaml"),
    ],
)
def test_an_algorithm_that_cannot_be_is_one_sentence(
    tmp_path: Path, algorithm: str, data: Path | None, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        pipeline.run_demo(pipeline.DemoOptions(run_dir=tmp_path, algorithm=algorithm, data=data))
