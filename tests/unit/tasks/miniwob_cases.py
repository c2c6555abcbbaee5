"""MiniWoB++'s own pages in a real Chromium: problems by seed, rewards, and pages of every kind. Run
by `make test-adapters`, which installs the package's files.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from megavlm.rewards.base import Example
from megavlm.tasks.miniwob.environment import _pages
from megavlm.tasks.miniwob.rows import TASKS
from tests.support.browsers import act, needs_chromium
from tests.unit.environments.adapters.played import opened, pixels, play, pool, texts

pytestmark = needs_chromium


def row(task: str, seed: int) -> Example:
    return Example("Do it.", "", extra={"task": task, "seed": seed})


def asked(shown: Any) -> str:
    return texts(shown)[2]


def test_a_seed_is_a_problem() -> None:
    async def work() -> None:
        async with pool("miniwob") as made:
            found = []
            for seed in (1, 1, 2):
                session = await opened(made)
                shown = await session.reset(row("click-button", seed), 0)
                found.append((asked(shown), pixels(shown)[0].tolist()))
                made.end(session)
            assert found[0] == found[1] != found[2]
            assert pixels(shown)[0].shape == (420, 320, 3)

    asyncio.run(work())


@pytest.mark.parametrize(("choice", "reward"), [("ONE", 1.0), ("TWO", 0.0)])
def test_the_page_gives_the_reward(choice: str, reward: float) -> None:
    async def steps(session: Any, shown: Any) -> None:
        assert asked(shown) == "Click button ONE."
        names = re.findall(r'button "(\w+)"', texts(shown)[-1])
        step = await session.step(act(action="click", mark=names.index(choice) + 1))
        assert (step.done, step.reward, step.info["correct"]) == (True, reward, reward > 0)

    play("miniwob", steps, row("click-test-2", 5), options={"marks": True, "accessibility": True})


def test_a_text_is_entered() -> None:
    async def steps(session: Any, shown: Any) -> None:
        word = asked(shown).split('"')[1]
        for call in (
            act(action="click", mark=1),
            act(action="type", text=word),
            act(action="click", mark=2),
        ):
            step = await session.step(call)
        assert (step.done, step.reward) == (True, 1.0)

    play("miniwob", steps, row("enter-text", 3), options={"marks": True})


def test_an_answer_in_words_ends_without_a_reward() -> None:
    async def steps(session: Any, shown: Any) -> None:
        step = await session.step("It is done.")
        assert (step.done, step.reward, step.info["correct"]) == (True, 0.0, False)

    play("miniwob", steps, row("click-button", 3))


def test_every_task_of_the_recipe_begins() -> None:
    async def work() -> None:
        async with pool("miniwob") as made:
            for task in TASKS:
                session = await opened(made)
                shown = await session.reset(row(task, 1), 0)
                assert len(asked(shown)) > 5, task
                assert not (await session.step(act(action="wait", amount=0))).done, task
                made.end(session)

    asyncio.run(work())


def test_pages_that_are_asked_for_exist() -> None:
    names = {path.stem for path in Path(_pages(), "miniwob").glob("*.html")}
    assert set(TASKS) <= names and len(names) == 130
