"""Environments of verifiers' classic interface, played in real processes: `make test-adapters`, as
verifiers needs other versions of packages than the lock has.
"""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megavlm.environments.base import Image, Observation
from megavlm.rewards.base import Example
from megavlm.subprocess_pool.failure import CallFailure
from tests.unit.environments.adapters.played import (
    ended,
    opened,
    parts,
    pixels,
    play,
    pool,
    refused,
    texts,
)

ROW = Example("How many?", "3", extra={"info": '{"least": 2}'})


def options(function: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"verifiers_environments:{function}", "arguments": arguments}


@pytest.mark.parametrize("id", ["verifiers-environments", "verifiers_environments:single"])
def test_one_turn_is_scored_by_the_rubric(id: str) -> None:
    async def steps(session: Any, shown: Observation) -> Any:
        assert [(m["role"], m["content"]) for m in shown.messages] == [("user", "How many?")]
        return await session.step("<think>Is it 2?</think>\n3")

    step = play("verifiers", steps, ROW, options={"id": id})
    assert step.done and step.reward == 1.5 and step.info["score"].correct
    assert step.info["score"].parts["right"] == 1.0 and step.info["score"].parts["brief"] == 1.0


def test_an_episode_of_several_turns_has_its_state_and_shows_images() -> None:
    async def steps(session: Any, shown: Observation) -> Any:
        first = await session.step("7")
        assert not first.done and texts(first.observation) == ["It is at least 2."]
        assert pixels(first.observation)[0][0, 0].tolist() == [7, 0, 0]
        assert [message["role"] for message in first.observation.messages] == ["user"]
        second = await session.step("9")
        assert pixels(second.observation)[0][0, 0].tolist() == [9, 0, 0]
        return await session.step("3")

    step = play("verifiers", steps, ROW, options=options("hints"))
    assert step.done and step.reward == 0.0, "its last message is the environment's"


def test_the_last_turn_is_scored_where_the_recipe_or_the_environment_ends_it() -> None:
    async def steps(session: Any, shown: Observation) -> list[Any]:
        return [await session.step("7"), await session.step("3")]

    of_recipe = play("verifiers", steps, ROW, options=options("hints"), max_turns=2)
    of_environment = play("verifiers", steps, ROW, options=options("hints", max_turns=2))
    for first, last in (of_recipe, of_environment):
        assert not first.done and last.done and last.reward == 1.0


def test_the_images_of_a_row_are_shown() -> None:
    async def steps(session: Any, shown: Observation) -> Observation:
        return shown

    image = Image.of(np.full((32, 32, 3), 5, np.uint8)).data
    row = Example("How <image> many?", "3", images=(image,), extra=ROW.extra)
    shown = play("verifiers", steps, row, options=options("hints"))
    assert parts(shown) == ["How ", Image(image), " many?"]


@pytest.mark.parametrize("chat", ["json", "xml"])
def test_tools_are_called_and_a_malformed_call_is_an_observation(chat: str) -> None:
    async def steps(session: Any, shown: Observation) -> None:
        (tool,) = shown.tools
        assert tool["function"]["name"] == "add"
        assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
        call = json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})
        if chat == "xml":
            values = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>"
            call = f"<function=add>\n{values}\n</function>"
        step = await session.step(f"I add.\n<tool_call>\n{call}\n</tool_call>")
        assert [(m["role"], m["content"]) for m in step.observation.messages] == [("tool", "3")]
        broken = await session.step("<tool_call>\nadd(1, 2)\n</tool_call>")
        assert broken.observation.messages[0]["role"] == "tool"
        assert parts(broken.observation).startswith("error: ")
        last = await session.step("3")
        assert last.done and last.reward == 1.0

    play("verifiers", steps, ROW, chat=chat, options=options("tools"))


@pytest.mark.parametrize(("text", "problem"), [("crash", "no such guess"), ("give up", "broken")])
def test_an_environment_that_fails_ends_its_episode(text: str, problem: str) -> None:
    async def steps(session: Any, shown: Observation) -> None:
        with pytest.raises(CallFailure, match=problem):
            await session.step(text)

    play("verifiers", steps, ROW, options=options("hints"))


def test_an_environment_that_changes_earlier_messages_fails() -> None:
    async def steps(session: Any, shown: Observation) -> None:
        with pytest.raises(CallFailure, match="it changes earlier messages"):
            await session.step("7")

    play("verifiers", steps, ROW, options=options("forgetful"))


def test_many_episodes_share_an_environment_and_each_is_cleaned_up(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def work() -> None:
        async with pool("verifiers", options=options("hints", log=str(log))) as made:
            sessions = [await opened(made) for _ in range(32)]
            await asyncio.gather(*(session.reset(ROW, 0) for session in sessions))
            for number in (1, 2):
                steps = await asyncio.gather(*(session.step(str(number)) for session in sessions))
                assert not any(step.done for step in steps)
            for session in sessions[:8]:
                assert (await session.step("3")).done
            for session in sessions:
                session.close()
            await ended(made)

    asyncio.run(work())
    assert log.read_text().splitlines() == ["ended"] * 32


def test_an_environment_leaves_the_signals_of_its_process_alone() -> None:
    async def work() -> None:
        async with pool("verifiers", options=options("hints")) as made:
            session = await opened(made)
            await session.reset(ROW, 0)
            psutil.Process(made._processes[0]._process.pid).send_signal(signal.SIGTERM)
            assert not (await session.step("7")).done

    asyncio.run(work())


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"id": "no-such-environment"}, "no-such-environment"),
        (options("grouped"), "scores whole groups"),
        (options("add", a=1, b=2), "is a int and not a MultiTurnEnv"),
        (options("hints", colour=1), "unexpected keyword argument 'colour'"),
    ],
)
def test_options_that_do_not_fit_end_a_run_before_it_starts(
    found: dict[str, Any], problem: str
) -> None:
    refused("verifiers", problem, options=found)
