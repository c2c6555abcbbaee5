"""The examples in the guide to environments and rewards work as it says."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from megavlm.config.import_path import import_object
from megavlm.config.load import load
from megavlm.config.reward import Reward
from megavlm.config.schema import Config
from megavlm.data.rows import Row
from megavlm.evaluation.attempts import Attempt, Candidate, Question, SkippedRows
from megavlm.rewards.base import Example, ResponseDetails, Score
from megavlm.rewards.manager import Part, RewardManager
from megavlm.rewards.registry import check_options, check_reward_row
from megavlm.rollout.rewards import make_reward_manager, reward_parts, used_tasks
from tests.docs.test_tutorial import FENCE, ROOT
from tests.support.timeouts import scaled


@pytest.fixture(autouse=True)
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the guide's files to the working directory, where nothing else imports them."""
    text = (ROOT / "docs/guides/environments.md").read_text(encoding="utf-8")
    for _, title, block in FENCE.findall(text):
        if title:
            (tmp_path / title).parent.mkdir(exist_ok=True)
            (tmp_path / title).write_text(block, encoding="utf-8")
    base = "environment: {name: single_turn}\n"
    (tmp_path / "mine.yaml").write_text(base, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def counting() -> Config:
    config: Config = load(Path("counting.yaml"), ["model.folder=x"])
    return config


def test_the_guide_s_task_scores_by_its_own_reward(counting: Config) -> None:
    assert [part.name for part in reward_parts(counting)] == ["counting"]
    manager = make_reward_manager(counting)

    async def score() -> list[Score]:
        texts = ("I count 3.", "There are 5", "none")
        found = [await manager.score(text, Example("How many?", "3")) for text in texts]
        await manager.close()
        return found

    right, off, none = asyncio.run(score())
    assert right == Score(1.0, True)
    assert (off.reward, off.correct, none.reward) == (pytest.approx(0.6), False, 0.0)


def test_the_guide_s_task_checks_options_and_rows() -> None:
    with pytest.raises(ValueError, match="counting's most is 0: set it above 0"):
        check_options("counting", {"most": 0})
    check_reward_row("counting", {"answer": "3"}, {"most": 5})
    with pytest.raises(ValueError, match="the answer 'red' is not a count"):
        check_reward_row("counting", {"answer": "red"}, {"most": 5})


def test_the_guide_s_task_shows_its_table(counting: Config) -> None:
    (task,) = used_tasks(counting)
    assert task.evaluation_page is not None
    questions = [
        Question(
            Row(index, "?", answer, (), "", f"rows:{index}"),
            tuple(Attempt("", 0.0, hit == "x", 1, "stop") for hit in hits),
        )
        for index, (answer, hits) in enumerate((("12", "x-"), ("3", "x"), ("3", "-")))
    ]
    candidate = Candidate("<b>", 1, questions, SkippedRows(), 1.0)
    html = import_object(task.evaluation_page)([candidate], ["<b>"])
    assert re.findall(r"<td>([^<]*)", html) == ["&lt;b&gt;", "3", "50%", "&lt;b&gt;", "12", "50%"]


def test_the_guide_s_ranking_ranks_a_group() -> None:
    manager = RewardManager(
        [Part("right", "exact_match", 0.9), Part("brief", "my_ranking:brief", 0.1)],
        Reward(on_failure="stop", workers=1, timeout=scaled(30), memory_mb=1024),
    )
    lengths = [(3, "stop"), (1, "stop"), (9, "length")]
    details = [ResponseDetails(finish, ("a",), (7,) * length) for length, finish in lengths]
    known = [Score(0.9, True, {"right": 1.0})] * 3

    async def score() -> list[Score]:
        found = await manager.score_group(["a"] * 3, details, known, Example("?", "a"))
        await manager.close()
        return found

    added = asyncio.run(score())
    assert [score.reward for score in added] == pytest.approx([0.05, 0.1, 0.0])
    assert added[0] == Score(added[0].reward, True, {"right": 1.0, "brief": 0.5})
