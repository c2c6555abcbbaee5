"""Environments on a server of OpenEnv, played in real processes."""

import asyncio
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from megavlm.environments.base import Image, Observation
from megavlm.subprocess_pool.failure import CallFailure
from tests.unit.environments.adapters.played import (
    ROW,
    USER,
    ended,
    opened,
    parts,
    pixels,
    play,
    pool,
    refused,
    serves,
    texts,
)

INSTALLED = find_spec("openenv") is not None  # by `make test-adapters`


@pytest.fixture(
    scope="module",
    params=["stand-in", *(["real"] if INSTALLED else [])],
)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serves(
        [sys.executable, str(USER / "openenv_server.py"), "{port}", request.param]
    ) as found:
        yield found


def guessing(url: str, **options: Any) -> dict[str, Any]:
    return {"url": url, "images": ["view"], **options}


def test_an_episode_is_played_to_its_reward(url: str) -> None:
    async def steps(session: Any, shown: Observation) -> None:
        assert texts(shown) == ["Play.", "\n\n", '{"hint": "guess", "tries": 0}']
        rewards, number = [], 0
        while not (step := await session.step(f'<action>{{"number": {number}}}</action>')).done:
            assert texts(step.observation) == [f'{{"hint": "higher", "tries": {number + 1}}}']
            assert pixels(step.observation)[0].shape == (32, 32)
            assert pixels(step.observation)[0].max() == number
            rewards, number = [*rewards, step.reward], number + 1
        assert step.reward == 1.0 and set(rewards) == {-0.1} and step.observation is None

    play("openenv", steps, seed=1, options=guessing(url))


def test_the_policys_text_may_be_a_field_and_fields_may_be_chosen(url: str) -> None:
    async def steps(session: Any, shown: Observation) -> None:
        assert [type(part) for part in parts(shown)] == [str, str, Image, str]
        assert texts(shown)[-1] == "guess\n0"
        step = await session.step("-1")
        assert texts(step.observation) == ["higher\n1"]

    play("openenv", steps, options=guessing(url, field="number", text=["hint", "tries"]))


def test_the_seed_and_the_options_of_the_recipe_reach_the_reset(url: str) -> None:
    async def steps(session: Any, shown: Observation) -> bool:
        return bool((await session.step('{"number": 0}')).done)

    assert play("openenv", steps, seed=5, options=guessing(url, reset={"highest": 0}))
    assert not play("openenv", steps, seed=5, options=guessing(url))


def test_an_action_that_is_not_accepted_is_an_observation(url: str) -> None:
    async def steps(session: Any, shown: Observation) -> None:
        for text, problem in (
            ("seven", "is not JSON"),
            ('{"number": NaN}', "is not JSON"),
            ("[" * 9999, "is not JSON"),
            ("7", "is not a JSON object"),
            ('{"number": "seven"}', "is not accepted: number: Input should be a valid int"),
            ('{"guess": 7}', "is not accepted: number: Field required"),
        ):
            step = await session.step(text)
            assert not step.done and step.info["counts"] == {"action_errors": 1}
            assert parts(step.observation).startswith(f"error: the action {problem}")
        assert not (await session.step('{"number": -1}')).done, "the session goes on"

    play("openenv", steps, options=guessing(url))


def test_an_environment_that_fails_ends_its_episode(url: str) -> None:
    async def steps(session: Any, shown: Observation) -> None:
        with pytest.raises(CallFailure, match=r"the server of OpenEnv failed: .*99 is too much"):
            await session.step('{"number": 99}')

    play("openenv", steps, options=guessing(url))


def test_each_episode_has_a_session_that_is_closed_with_it(url: str) -> None:
    async def count(session: Any) -> int:
        step = await session.step('{"number": 77}')
        return int(texts(step.observation)[0].split("open: ")[1].split('"')[0])

    async def work() -> None:
        async with pool("openenv", options=guessing(url), workers=2) as made:
            sessions = [await opened(made) for _ in range(32)]
            await asyncio.gather(*(session.reset(ROW, 0) for session in sessions))
            before = await count(sessions[0])
            assert before >= 32
            for session in sessions[1:]:
                session.close()
            async with asyncio.timeout(30):
                while await count(sessions[0]) > before - 31:
                    await asyncio.sleep(0.1)
            sessions[0].close()
            await ended(made)

    asyncio.run(work())


def test_a_server_without_room_for_a_session_fails_the_reset_with_its_reason(url: str) -> None:
    async def work() -> None:
        async with pool("openenv", options=guessing(url)) as made:
            sessions = [await opened(made) for _ in range(66)]
            results = await asyncio.gather(
                *(session.reset(ROW, 0) for session in sessions), return_exceptions=True
            )
            failures = [str(found) for found in results if isinstance(found, CallFailure)]
            assert failures and all("the server of OpenEnv failed" in text for text in failures)

    asyncio.run(work())


def test_a_server_that_does_not_answer_ends_a_run_before_it_starts() -> None:
    refused(
        "openenv",
        r"no server of OpenEnv answers at ws://127.0.0.1:1/ws \(",
        options=guessing("http://127.0.0.1:1"),
    )
