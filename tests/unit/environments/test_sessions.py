"""Sessions of a user's environment in real processes."""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import pytest

from megavlm.config.environment import EnvironmentConfig
from megavlm.environments import processes, sessions
from megavlm.environments.base import Context
from megavlm.environments.processes import EnvironmentPool, Local
from megavlm.environments.sessions import RemoteEnvironment
from megavlm.environments.single_turn import SingleTurn
from megavlm.environments.tools.load import Toolbox
from megavlm.environments.worker import Session, Worker
from megavlm.rewards.base import Example, Score
from megavlm.subprocess_pool.failure import CallFailure
from megavlm.subprocess_pool.wire import receive
from tests.support.timeouts import scaled

ROW = Example("How many?", "3")
MASK = b"\x89PNG\x00\xff"


@pytest.fixture(scope="module", autouse=True)
def user_modules() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "user"), prepend=os.pathsep)
        yield


async def score(text: str, row: Example) -> Score:
    number = int(text.split()[-1])
    await asyncio.sleep(0.1 / (1 + number))  # the later ones come first
    return Score(float(number), True)


CONTEXT = Context(score, 9)


@asynccontextmanager
async def pool(name: str = "Keeping", **settings: Any) -> AsyncIterator[EnvironmentPool]:
    settings = {"workers": 1, "timeout": scaled(30), "memory_mb": 1024, **settings}
    made = await processes.make_environments(
        EnvironmentConfig(name=f"session_environments:{name}", **settings)
    )
    assert isinstance(made, EnvironmentPool)
    try:
        yield made
    finally:
        await made.close()


async def opened(pool: EnvironmentPool, count: int = 1) -> list[RemoteEnvironment]:
    made = [await pool.make(CONTEXT) for _ in range(count)]
    await asyncio.gather(*(session.reset(ROW, 0) for session in made))
    return made


async def number(session: RemoteEnvironment, text: str) -> float:
    return (await session.step(text)).reward


async def closed(pool: EnvironmentPool) -> None:
    """Wait until no session is open."""
    async with asyncio.timeout(scaled(60)):
        while any(process.sessions for process in pool._processes):
            await asyncio.sleep(0.01)


async def given_up(call: Coroutine[Any, Any, Any]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call, 1)


async def fails(call: Coroutine[Any, Any, Any], match: str) -> None:
    with pytest.raises(CallFailure, match=match):
        await call


def runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def gone(process: int) -> None:
    """Wait until a killed process has ended."""
    async with asyncio.timeout(scaled(20)):
        while runs(process):
            await asyncio.sleep(0.01)


def counted(log: Path) -> list[int]:
    """Return how often each session that was opened has been closed."""
    lines = [line.split() for line in log.read_text().splitlines()]
    closes = Counter(name for word, name in lines if word == "closed")
    return [closes[name] for word, name in lines if word == "opened"]


def test_an_environment_holds_what_cannot_be_pickled_over_its_turns() -> None:
    async def work() -> None:
        async with pool() as made:
            session, other = await opened(made, 2)
            assert [await number(session, "keep") for _ in range(3)] == [10, 20, 30]
            assert await number(other, "keep") == 10

    asyncio.run(work())


def test_many_sessions_wait_at_the_same_time_in_few_processes() -> None:
    async def work() -> None:
        async with pool(workers=2, timeout=scaled(120)) as made:
            found = await opened(made, 64)
            steps = await asyncio.gather(*(session.step("together") for session in found))
            assert all(step.done for step in steps)
            assert len(made._processes) == 2

    asyncio.run(work())


def test_each_session_gets_its_own_scores() -> None:
    async def work() -> None:
        async with pool() as made:
            found = await opened(made, 8)
            asked = [number(session, f"score {i}") for i, session in enumerate(found)]
            assert await asyncio.gather(*asked) == list(range(8))

    asyncio.run(work())


def test_bytes_arrive_as_bytes_and_what_cannot_be_sent_fails_its_call() -> None:
    extra = {"mask": MASK, "deep": [{"bytes": MASK, "path": None}], "day": date(2026, 1, 2)}
    row = Example("How many?", "3", images=(MASK,), extra=extra)

    async def work() -> None:
        async with pool() as made:
            session = await made.make(CONTEXT)
            await session.reset(row, 0)
            step = await session.step("columns")
            assert step.observation is not None
            shown = repr(({**extra, "day": "2026-01-02"}, (MASK,)))
            assert step.observation.messages[0]["content"] == shown
            await session.step("score 1")  # the row goes to the reward and back
            await fails(session.step("picture"), "texts and images, with Image.of for a picture")
            await fails(session.step("set"), r"\{1\} is a set, and JSON cannot hold it")
            assert await number(session, "keep") == 10, "the session goes on"
            other = await made.make(CONTEXT)
            odd = replace(row, extra={"odd": object()})
            await fails(other.reset(odd, 0), "is a object, and JSON cannot hold it")

    asyncio.run(work())


def test_a_step_that_blocks_fails_alone_and_its_process_ends_with_the_other_sessions() -> None:
    async def work() -> None:
        async with pool(timeout=2.0) as made:
            blocked, other = await opened(made, 2)
            place = int(await number(other, "process"))
            await given_up(blocked.step("block"))
            blocked.close()
            assert await number(other, "keep") == 10
            (later,) = await opened(made)
            assert await number(later, "process") != place, "it takes no further sessions"
            await asyncio.sleep(3)
            assert await number(other, "keep") == 20, "also after the time to close"
            other.close()
            later.close()
            await closed(made)
            await gone(place)

    asyncio.run(work())


def test_a_call_that_can_be_cancelled_leaves_its_process_in_use(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def work() -> None:
        async with pool(options={"log": str(log)}) as made:
            session, other = await opened(made, 2)
            place = await number(other, "process")
            await given_up(session.step("hang"))
            session.close()
            async with asyncio.timeout(scaled(30)):
                while len(made._processes[0].sessions) > 1:
                    await asyncio.sleep(0.01)
            assert sorted(counted(log)) == [0, 1]
            (later,) = await opened(made)
            assert await number(later, "process") == place

    asyncio.run(work())
    assert counted(log) == [1, 1, 1]


def test_a_step_that_raises_leaves_its_process_in_use() -> None:
    """The failed call is over, so that closing its session does not wait for it."""

    async def work() -> None:
        async with pool() as made:
            session, _ = await opened(made, 2)
            await fails(session.step("set"), "JSON cannot hold it")
            session.close()
            assert made._processes[0].takes_sessions, "also before it has closed"

    asyncio.run(work())


def test_a_process_that_answers_nothing_ends_with_its_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "ANSWER_SECONDS", 1.0)

    async def work() -> None:
        async with pool() as made:
            holding, other = await opened(made, 2)
            await given_up(holding.step("hold"))
            holding.close()
            await fails(other.step("keep"), "timeout: its process no longer answers")
            (later,) = await opened(made)
            assert await number(later, "keep") == 10

    asyncio.run(work())


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("die", "crash: its process ended with 3; it printed: what it said last"),
        ("allocate", "memory: out of memory"),
    ],
)
def test_the_end_of_a_process_fails_the_sessions_in_it_and_no_others(
    fault: str, problem: str
) -> None:
    async def work() -> None:
        async with pool(workers=2) as made:
            found = await opened(made, 3)
            places = [await number(session, "process") for session in found]
            assert places[0] == places[2] != places[1]
            await asyncio.gather(
                fails(found[0].step(fault), problem), fails(found[2].step("hang"), problem)
            )
            await fails(found[2].step("keep"), problem)
            assert await number(found[1], "keep") == 10
            (later,) = await opened(made)
            assert await number(later, "keep") == 10

    asyncio.run(work())


def test_a_process_that_has_children_without_sessions_is_replaced() -> None:
    async def work() -> None:
        async with pool() as made:
            session, other = await opened(made, 2)
            child, place = int(await number(session, "child")), int(await number(other, "process"))
            session.close()
            assert await number(other, "keep") == 10
            assert runs(child), "the other session might have started it"
            other.close()
            await closed(made)
            await gone(child)
            await gone(place)
            (later,) = await opened(made)
            assert await number(later, "process") != place

    asyncio.run(work())


def test_a_task_that_exits_ends_its_session_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def work() -> None:
        async with pool(options={"log": str(log)}) as made:
            session, other = await opened(made, 2)
            await session.step("exit later")
            async with asyncio.timeout(scaled(30)):
                while sorted(counted(log)) != [0, 1]:
                    await asyncio.sleep(0.01)
            await fails(session.step("keep"), "exception: an earlier error ended it")
            assert await number(other, "keep") == 10
            session.close()

    asyncio.run(work())
    assert counted(log) == [1, 1]


def test_a_step_that_comes_as_its_session_ends_is_answered() -> None:
    """The last moment is before the session is removed, which needs the lock."""
    ours, theirs = socket.socketpair()
    worker = Worker(theirs, SingleTurn, {}, Toolbox((), ()))
    session = worker.sessions[0] = Session(worker, 0)

    class Lock:
        def __enter__(self) -> None:
            session.put({"session": 0, "id": 7, "step": "late"})

        def __exit__(self, *_: object) -> None: ...

    worker.lock = Lock()  # type: ignore[assignment]
    session._closing.set()
    session._run()
    ours.settimeout(1)
    assert receive(ours) == {
        "id": 7,
        "failure": "exception",
        "message": "an earlier error ended it",
    }


@pytest.mark.parametrize(
    ("name", "on_close"),
    [("Keeping", ""), ("Keeping", "raise"), ("Keeping", "hang"), ("Plain", "")],
)
def test_a_run_s_end_closes_each_session_once_and_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, on_close: str
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(processes, "CLOSE_SECONDS", 5.0 if on_close != "hang" else 1.0)

    async def work() -> None:
        options = {"log": str(log), "on_close": on_close}
        async with pool(name, options=options, timeout=1000) as made:
            first, *_, last = await opened(made, 4)
            with pytest.raises(CallFailure, match="KeyError"):
                await last.step("raise")
            first.close()
            first.close()
            places = [process._process.pid for process in made._processes]
        assert not any(map(runs, places))

    asyncio.run(asyncio.wait_for(work(), scaled(60)))
    assert counted(log) == [1] * 4


def test_a_built_in_environment_that_is_left_open_is_closed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[SingleTurn] = []

    async def close(self: SingleTurn) -> None:
        ended.append(self)
        raise KeyError("as told")

    async def work() -> None:
        made = Local(SingleTurn, {})
        found = [await made.make(CONTEXT) for _ in range(3)]
        made.end(found[1])
        await made.close()
        assert ended[0] is found[1] and sorted(map(id, ended)) == sorted(map(id, found))

    monkeypatch.setattr(SingleTurn, "close", close, raising=False)
    asyncio.run(work())
    assert "an environment did not close: KeyError('as told')" in caplog.text


def test_a_recipe_s_tools_are_called_in_processes_with_limits() -> None:
    """Also where the environment itself would run in the trainer's process."""
    tools = ("session_environments:where",)
    settings = EnvironmentConfig(name="geo3k_calculator", tools=tools, max_turns=3, workers=1)
    call = '<tool_call>\n{"name": "where", "arguments": {}}\n</tool_call>'

    async def work() -> None:
        made = await processes.make_environments(settings)
        environment = await made.make(CONTEXT)
        shown = await environment.reset(ROW, 0)
        names = [schema["function"]["name"] for schema in shown.tools]
        assert names == ["calculator", "where"]
        step = await environment.step(call)
        assert step.observation is not None
        assert int(step.observation.messages[0]["content"]) != os.getpid()
        await made.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("name", "tools", "problem"),
    [
        ("tools", ("session_environments:nothing",), "environment.tools=.*nothing cannot be impo"),
        ("tools", ("session_environments:untyped",), "the tool untyped has no type for its argu"),
        ("session_environments:Keeping", ("session_environments:where",), "calls no tools; set"),
        (
            "session_environments:Locating",
            ("session_environments:where",),
            "so has the envi",
        ),
    ],
)
def test_tools_that_cannot_be_called_are_refused_before_a_start(
    name: str, tools: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        asyncio.run(processes.make_environments(EnvironmentConfig(name=name, tools=tools)))
