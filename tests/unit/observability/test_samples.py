"""Sampled rollouts: which are kept, and that the folder stays small and whole."""

from pathlib import Path

import pytest

from megavlm.observability.records import Record, read_records
from megavlm.observability.samples import SAMPLES_FILE, SAMPLES_FOLDER, SampleWriter

from .runs import group, image


def records(folder: Path) -> list[Record]:
    return read_records(folder / SAMPLES_FOLDER / SAMPLES_FILE)


@pytest.mark.parametrize("num_steps", [1, 40, 100, 101, 5000])
def test_the_number_of_steps_kept_is_bounded(tmp_path: Path, num_steps: int) -> None:
    writer = SampleWriter(tmp_path, num_steps=num_steps)
    due = [step for step in range(1, num_steps + 1) if writer.is_due(step)]
    assert due[0] == 1 and due[-1] == num_steps
    assert min(num_steps, 50) <= len(due) <= 102


def test_a_step_that_is_not_due_leaves_nothing(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, num_steps=1000)
    writer.write(7, [group(images=[image("a")])])
    assert records(tmp_path) == [] and not (tmp_path / SAMPLES_FOLDER / "a.png").exists()


def test_a_group_is_kept_whole(tmp_path: Path) -> None:
    key, png = image("abc")
    SampleWriter(tmp_path, num_steps=1).write(1, [group("Why?\n", images=[(key, png)])])
    assert records(tmp_path) == [
        {
            "step": 1,
            "prompt": "Why?\n",
            "answer": "2",
            "category": "count",
            "source": "train.parquet:7",
            "images": ["abc.png"],
            "responses": [
                {"text": "2", "reward": 1.0, "correct": True, "finish": "stop"},
                {"text": "3", "reward": 0.0, "correct": False, "finish": "stop"},
            ],
        }
    ]
    assert (tmp_path / SAMPLES_FOLDER / "abc.png").read_bytes() == png()


def test_the_groups_kept_are_of_many_categories(tmp_path: Path) -> None:
    groups = [group(category=category) for category in ["a", "a", "a", "a", "b", "c"]]
    SampleWriter(tmp_path, num_steps=1).write(1, groups)
    assert [record["category"] for record in records(tmp_path)] == ["a", "b", "c", "a"]


def test_a_resume_drops_what_lies_beyond_it(tmp_path: Path) -> None:
    for start, last in [(0, 4), (2, 3)]:
        writer = SampleWriter(tmp_path, start, num_steps=4)
        for step in range(start + 1, last + 1):
            writer.write(step, [group(str(start))])
    found = [(record["step"], record["prompt"]) for record in records(tmp_path)]
    assert found == [(1, "0"), (2, "0"), (3, "2")]
