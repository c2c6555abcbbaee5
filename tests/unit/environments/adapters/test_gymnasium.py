"""Environments of gymnasium, played in real processes."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from megavlm.environments.adapters.gymnasium import Gymnasium
from megavlm.environments.base import Image, Observation
from megavlm.rewards.base import Example
from tests.unit.environments.adapters.played import (
    ROW,
    opened,
    parts,
    pixels,
    play,
    pool,
    refused,
    texts,
)

WALK = {"id": "gym_environments:Walk-v0", "actions": ["back", "forth"]}
LAKE = {
    "id": "FrozenLake-v1",
    "make": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}


def test_an_environment_of_the_library_is_played_to_its_reward() -> None:
    async def steps(session: Any, shown: Observation) -> list[Any]:
        path = ("down", "Down", "<action>right</action>", "down", "right")
        seen = [await session.step(text) for text in path]
        assert [texts(step.observation) for step in seen] == [["4"], ["8"], ["9"], ["13"], ["14"]]
        return [texts(shown), await session.step("<think>Not up.</think>So <action>right</action>")]

    first, last = play("gymnasium", steps, options=LAKE)
    assert first == ["Play.", "\n\n", "0"]
    assert last.done and last.reward == 1.0 and last.observation is None


def test_observations_are_images_and_a_group_starts_from_one_seed(tmp_path: Path) -> None:
    async def steps(session: Any, shown: Observation) -> tuple[Observation, Any]:
        return shown, await session.step("back")

    shown, step = play("gymnasium", steps, seed=3, options=WALK)
    again, other = (play("gymnasium", steps, seed=seed, options=WALK)[0] for seed in (3, 6))
    assert shown == again != other
    before, after = pixels(shown)[0], pixels(step.observation)[0]
    assert before.shape == (32, 160, 3) and before.max() == 200
    assert np.array_equal(np.roll(before, -32, axis=1), after) and step.reward == -0.1


def test_a_rendered_picture_is_shown_if_the_recipe_asks_for_it() -> None:
    async def steps(session: Any, shown: Observation) -> Observation:
        return shown

    make = {"render_mode": "rgb_array"}
    alone = play("gymnasium", steps, options={**WALK, "make": make, "show": "render"})
    both = play("gymnasium", steps, options={**WALK, "make": make, "show": "both"})
    assert [picture.max() for picture in pixels(alone)] == [100]
    assert [picture.max() for picture in pixels(both)] == [100, 200]


def test_the_images_of_a_row_come_before_the_first_observation() -> None:
    async def steps(session: Any, shown: Observation) -> Observation:
        return shown

    image = Image.of(np.full((32, 32, 3), 7, np.uint8)).data
    row = Example("Like <image> this.", "", images=(image,))
    found = play("gymnasium", steps, row, options=WALK)
    assert [type(part) for part in parts(found)] == [str, Image, str, str, Image]
    assert [picture.max() for picture in pixels(found)] == [7, 200]


def test_actions_and_observations_may_be_texts_and_mappings() -> None:
    async def steps(session: Any, shown: Observation) -> list[Any]:
        return [shown, *[await session.step(text) for text in ("Hello", "x" * 30, "you", "bye")]]

    first, hello, long, you, bye = play(
        "gymnasium", steps, options={"id": "gym_environments:Parrot-v0"}
    )
    assert texts(first)[-1] == '{"said": "-", "view": "image 1", "size": [2, 3]}'
    assert "Hello" in texts(hello.observation)[0] and pixels(hello.observation)[0].max() == 1
    assert parts(long.observation).startswith(f"error: {'x' * 30!r} is not an action; actions are")
    assert pixels(you.observation)[0].max() == 2, "the environment has not seen the wrong action"
    assert bye.done and bye.reward == 0.5, "it was truncated"


def test_an_action_of_several_parts_is_json() -> None:
    async def steps(session: Any, shown: Observation) -> list[Any]:
        right = '{"move": [2, [0.5, -1]], "word": "up"}'
        wrong = ["up", "[1]", '{"move": 1}', '{"move": [2, [0.5]], "word": "up"}', right[:-1]]
        return [await session.step(text) for text in (right, *wrong)]

    right, *wrong = play("gymnasium", steps, options={"id": "gym_environments:Many-v0"})
    assert texts(right.observation) == ["2 [0.5, -1.0] up"]
    assert all(parts(step.observation).startswith("error: ") for step in wrong)
    assert all(step.info["counts"] == {"action_errors": 1} for step in wrong)


@pytest.mark.parametrize(
    ("space", "right", "wrong"),
    [
        (
            spaces.MultiDiscrete([3, 3]),
            ["[1, 0]", "[1.0, 0]"],
            ["[1.7, 0.9]", "[true, 0]", '["1", 0]', "[1]", "[4, 0]", "[1e999, 0]", "[" * 9999],
        ),
        (spaces.Discrete(3), ["1"], ["true", "1.0", '"1"', "NaN", "null"]),
        (spaces.Box(0, 255, (2,), np.uint8), ["[7, 255]"], ["[300, 0]", "[-1, 0]", "[0.5, 0]"]),
        (spaces.Box(-9, 9, (1,)), ["[0.5]", "[1]"], ["[true]", '["0.5"]', "[NaN]", "0.5"]),
        (spaces.Box(-np.inf, np.inf, (1,)), ["[1e9]"], ["[1e999]", "[Infinity]"]),
        (spaces.MultiBinary(2), ["[1, 0]"], ["[2, 0]", "[true, false]"]),
        (spaces.Dict(a=spaces.Discrete(2)), ['{"a": 1}'], ['{"a": 1, "b": 2}', "[1]", "{}"]),
    ],
)
def test_an_action_is_played_as_it_is_written_or_refused(
    space: Any, right: list[str], wrong: list[str]
) -> None:
    adapter = object.__new__(Gymnasium)
    adapter.env, adapter._actions = SimpleNamespace(action_space=space), []  # type: ignore[assignment]
    for text in right:
        assert np.all(np.equal(list(_leaves(adapter.read(text))), list(_leaves(json.loads(text)))))
    for text in wrong:
        with pytest.raises(ValueError, match="is not an action; actions are"):
            adapter.read(text)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    yield from np.ravel(value)


def test_an_action_that_cannot_be_read_is_an_observation() -> None:
    async def steps(session: Any, shown: Observation) -> None:
        for text in ("jump", "", "1", "<action>up"):
            step = await session.step(text)
            assert not step.done and step.reward == 0
            assert parts(step.observation) == (
                f"error: {text!r} is not an action; write one of left, down, right, up"
            )

    play("gymnasium", steps, options=LAKE)


def test_discrete_actions_without_names_are_numbers() -> None:
    async def steps(session: Any, shown: Observation) -> list[Any]:
        return [await session.step(text) for text in ("0", "3", "1.5", "two", "1")]

    *wrong, right = play("gymnasium", steps, options={"id": WALK["id"]})
    assert [parts(step.observation)[:6] for step in wrong] == ["error:"] * 4
    assert right.reward == -0.1


def test_a_class_may_extend_the_adapter() -> None:
    async def steps(session: Any, shown: Observation) -> Observation:
        return shown

    shown = play("gym_environments:Counted", steps, options={"length": 5})
    assert texts(shown)[-1].startswith("5 cells, and you are in cell ")


def test_many_environments_are_closed_whatever_ends_them(tmp_path: Path) -> None:
    options = {**WALK, "make": {"log": str(tmp_path / "log")}}

    async def work() -> None:
        async with pool("gymnasium", options=options, workers=2) as made:
            sessions = [await opened(made) for _ in range(32)]
            await asyncio.gather(*(session.reset(ROW, 1) for session in sessions))
            steps = await asyncio.gather(*(session.step("forth") for session in sessions))
            assert len({(step.reward, step.done) for step in steps}) == 1
            for session in sessions[:16]:
                session.close()

    asyncio.run(work())
    closed = (tmp_path / "log").read_text().splitlines()
    assert len(closed) == 32 + 2, "and one for the check of each process"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"id": "Nowhere-v0"}, "Environment `Nowhere` doesn't exist"),
        ({"id": "no_such_module:Walk-v0"}, "No module named 'no_such_module'"),
        ({**WALK, "actions": ["forth"]}, "actions has 1 names for Discrete"),
        ({**WALK, "show": "render"}, "show=render needs pixels: set .*render_mode=rgb_array"),
        ({**WALK, "show": "all"}, "show=all: choose observation, render or both"),
        ({**WALK, "make": {"colour": 1}}, "unexpected keyword argument 'colour'"),
    ],
)
def test_options_that_do_not_fit_end_a_run_before_it_starts(
    options: dict[str, Any], problem: str
) -> None:
    refused("gymnasium", problem, options=options)
