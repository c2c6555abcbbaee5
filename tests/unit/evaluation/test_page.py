"""Tables, files and the page of an evaluation."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megavlm.data.media.video_sources import Video, VideoFile
from megavlm.data.rows import Row
from megavlm.evaluation.attempts import Attempt, Candidate, Question, SkippedRows, Turn
from megavlm.evaluation.files import write_attempts
from megavlm.evaluation.page import TaskSection, write_page
from megavlm.evaluation.tables import compare_models, tabulate
from tests.conftest import png
from tests.support.video_files import grey_video
from tests.unit.data.test_report import EVIL, Tags


def attempt(correct: bool, text: str = "yes") -> Attempt:
    return Attempt(text, 0.9 * correct, correct, 3, "stop", {"format": 1.0})


def question(index: int, hits: str, **values: object) -> Question:
    """`hits`: an attempt per character, x where it is correct."""
    row = Row(
        index=index,
        problem="<image>?",
        answer="yes",
        images=(png(),),
        category="even" if index % 2 == 0 else "odd",
        source=f"test.parquet:{index}",
        dataset="set/test",
        **values,  # type: ignore[arg-type]
    )
    return Question(row, tuple(attempt(hit == "x") for hit in hits))


def candidate(name: str, questions: list[Question]) -> Candidate:
    return Candidate(name, len(questions[0].attempts), questions, SkippedRows(), 1.0)


def test_measures_by_hand() -> None:
    table = tabulate([question(0, "xx--"), question(1, "----"), question(2, "xxxx")])
    values = {name: found.value for name, found in table.overall.items()}
    assert list(values) == ["pass@1", "pass@2", "pass@4", "mean@4", "reward", "response_tokens"]
    assert values["pass@1"] == values["mean@4"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert values["pass@2"] == pytest.approx((1 - 1 / 6 + 0 + 1) / 3)
    assert values["pass@4"] == pytest.approx(2 / 3)
    assert values["reward"] == pytest.approx(0.45) and values["response_tokens"] == 3
    assert table.overall["pass@4"].method == "wilson" and table.overall["pass@4"].count == 3
    assert table.by_category["even"]["pass@1"].value == pytest.approx(0.75)
    assert table.by_category["odd"]["pass@1"].value == 0
    assert list(table.by_dataset) == ["set/test"]
    three = tabulate([question(0, "x--")]).overall
    assert [name for name in three if name.startswith("pass")] == ["pass@1", "pass@2", "pass@3"]


def test_comparison_is_of_the_same_questions() -> None:
    first = [question(0, "x"), question(1, "x"), question(2, "-"), question(7, "x")]
    second = [question(2, "x"), question(1, "-"), question(0, "-"), question(9, "x")]
    found = compare_models(first, second)
    assert found is not None
    assert found.accuracy.count == 3 and found.accuracy.difference == pytest.approx(1 / 3)
    assert (found.accuracy.first_better, found.accuracy.second_better) == (2, 1)
    assert found.accuracy.method == "mcnemar" and found.accuracy.p_value == 1
    assert found.reward.difference == pytest.approx(0.3)
    assert found.by_category["odd"].difference == 1
    assert compare_models([question(0, "x")], [question(1, "x")]) is None
    json.dumps(asdict(found))


def test_every_attempt_is_in_the_file(tmp_path: Path) -> None:
    both = [
        candidate("a", [question(0, "x-"), question(1, "--")]),
        candidate("b", [question(0, "xx")]),
    ]
    write_attempts(tmp_path / "x.parquet", both)
    records = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert [(r["model"], r["question"], r["attempt"], r["correct"]) for r in records] == [
        ("a", 0, 0, True),
        ("a", 0, 1, False),
        ("a", 1, 0, False),
        ("a", 1, 1, False),
        ("b", 0, 0, True),
        ("b", 0, 1, True),
    ]
    assert json.loads(records[0]["parts"]) == {"format": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


def page_of(
    tmp_path: Path, candidates: list[Candidate], sections: Sequence[TaskSection] = ()
) -> tuple[str, Tags]:
    tables = [tabulate(c.questions) for c in candidates]
    comparison = None
    if len(candidates) == 2:
        comparison = compare_models(candidates[0].questions, candidates[1].questions)
    write_page(tmp_path / "page.html", candidates, tables, comparison, sections)
    html, tags = (tmp_path / "page.html").read_text(), Tags()
    tags.feed(html)
    assert tags.open == []
    return html, tags


def test_the_page_shows_both_models_and_runs_nothing(tmp_path: Path) -> None:
    evil = question(0, "x", extra={"lat": 1.0, "lon": EVIL})
    evil = Question(evil.row, (attempt(True, EVIL),))
    first = candidate(EVIL, [evil, question(1, "x"), question(2, "x")])
    second = candidate("other", [question(0, "-"), question(1, "x")])
    html, tags = page_of(tmp_path, [first, second])
    names = [tag for tag, _ in tags.seen]
    assert "script" not in names and names.count("article") == 3
    assert not any(name.startswith("on") for _, attributes in tags.seen for name in attributes)
    images = [attributes["src"] for tag, attributes in tags.seen if tag == "img"]
    assert len(images) == 3 and all(src.startswith("data:image/") for src in images)
    assert "pass@1" in html and "McNemar" in html and "other" in html
    # Where they differ comes first.
    assert html.index("test.parquet:0") < html.index("test.parquet:1")


def test_the_page_shows_the_first_frame_of_a_video(tmp_path: Path) -> None:
    frames = (png(16, 16), png(32, 32))
    shown = [question(0, "x", videos=(Video(frames, 2.0), VideoFile(grey_video(4))))]
    _, tags = page_of(tmp_path, [candidate("one", shown)])
    assert [tag for tag, _ in tags.seen].count("img") == 3


def test_the_page_of_one_model(tmp_path: Path) -> None:
    left_out = SkippedRows(2, 1, ("test.parquet:9: broken",))
    asked = question(0, "x-", extra={"region": "", "city": "Rome"})
    one = Candidate("a", 2, [asked], left_out, 1.0)
    html, _ = page_of(tmp_path, [one])
    assert "city Rome" in html and "region" not in html
    assert "p-value" not in html and "test.parquet:9: broken" in html and "mean@2" in html


def test_models_are_named_by_the_end_of_their_path(tmp_path: Path) -> None:
    paths = ("/home/me/runs/mine/checkpoints", "/home/me/models/Qwen2.5-VL-3B-Instruct")
    html, _ = page_of(tmp_path, [candidate(path, [question(0, "x")]) for path in paths])
    assert [html.count(path) for path in paths] == [1, 1], "in the subtitle"
    assert "pass@1 of Qwen2.5-VL-3B-Instruct" in html and "pass@1 of mine/checkpoints" in html


def test_later_turns_show_their_message_and_images(tmp_path: Path) -> None:
    asked = question(0, "x")
    turns = [Turn("calculator(2+2)"), Turn("4", "The result<image>is four", [png()])]
    played = Question(asked.row, (replace(asked.attempts[0], turns=turns),))
    html, tags = page_of(tmp_path, [candidate("a", [played])])
    order = [
        html.index(text) for text in ("calculator(2+2)", "The result", "is four", "<b>0.900</b>")
    ]
    assert order == sorted(order) and "<img" in html[order[1] : order[2]]
    assert [tag for tag, _ in tags.seen].count("img") == 2


def test_rewards_that_failed_are_told(tmp_path: Path) -> None:
    first = question(0, "x-")
    failed = replace(first.attempts[1], failure="timeout")
    one = candidate("a", [Question(first.row, (first.attempts[0], failed))])
    html, _ = page_of(tmp_path, [one])
    assert "1 responses count as incorrect because their reward failed (timeout 1)" in html
    assert html.count("reward failed: timeout") == 1
    write_attempts(tmp_path / "x.parquet", [one])
    records = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert [record["failure"] for record in records] == [None, "timeout"]
