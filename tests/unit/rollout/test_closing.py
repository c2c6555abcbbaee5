"""Each environment is closed once, however its episode ends."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megavlm.data.processor import Processor
from megavlm.inference.requests import RequestRefused, RequestTimedOut
from megavlm.rollout.episodes import EpisodeRunner
from megavlm.rollout.trajectory import Group
from tests.support.timeouts import scaled
from tests.unit.environments.test_sessions import closed, counted
from tests.unit.rollout.scripted import ROW, RUNNER, Policy, episode_runner, graded

KEEPING = "session_environments:Keeping"
FOLDER = Path(__file__).parents[1] / "environments" / "user"


@pytest.fixture(scope="module", autouse=True)
def keeping_modules() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FOLDER), prepend=":")
        yield


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("closing") / "log"


@pytest.fixture(scope="module")
def playing(processor: Processor, log: Path, keeping_modules: None) -> Iterator[EpisodeRunner]:
    settings = {"timeout": scaled(3), "max_turns": 2, "workers": 1, "memory_mb": 1024}
    made = episode_runner(processor, graded(), KEEPING, options={"log": str(log)}, **settings)
    yield made
    RUNNER.run(made.close())


class Unanswered(Policy):
    error: Exception = RequestTimedOut("no answer")

    async def ask(self, prompt: Any, **_: Any) -> Any:
        raise self.error


class Refused(Unanswered):
    error = RequestRefused("HTTP 400")


class Aborted(Policy):
    """Is aborted before any response is complete."""

    async def __call__(self, prompts: Any, n: int, groups: Any, on_complete: Any) -> None:
        groups[0][:] = [replace(self.respond(), finish="abort") for _ in range(n)]


class TimedOut(Policy):
    """Has no answer to the first request."""

    async def __call__(self, prompts: Any, n: int, groups: Any, on_complete: Any) -> None:
        await on_complete(0, [], self.ask)


@pytest.mark.parametrize(
    ("policy", "texts", "has_ended"),
    [
        pytest.param(Policy, ["3", "3"], True, id="done"),
        pytest.param(Policy, ["4", "4", "3", "4"], True, id="max_turns"),
        pytest.param(lambda *of: Policy(*of, cut=True), ["4", "4"], True, id="truncated"),
        pytest.param(Policy, ["1", "3"], True, id="step raises"),
        pytest.param(Policy, ["2", "3"], True, id="step times out"),
        pytest.param(Refused, ["4", "3"], True, id="request refused"),
        pytest.param(Unanswered, ["4", "3"], False, id="later request timed out"),
        pytest.param(TimedOut, [], False, id="first request timed out"),
        pytest.param(Aborted, ["3", "3"], False, id="aborted"),
    ],
)
def test_an_environment_is_closed_once(
    processor: Processor,
    playing: EpisodeRunner,
    log: Path,
    policy: Callable[..., Policy],
    texts: list[str],
    has_ended: bool,
) -> None:
    log.unlink(missing_ok=True)
    group = Group(processor.prompt(ROW))
    RUNNER.run(playing.play(RUNNER.run(playing.start([group], 2)), policy(processor, *texts)))
    assert group.has_ended == has_ended
    RUNNER.run(closed(playing._environments))  # type: ignore[arg-type]
    assert counted(log) == [1, 1]


def test_an_environment_is_closed_whose_episode_ahead_is_stopped_or_not_answered(
    processor: Processor, playing: EpisodeRunner, log: Path
) -> None:
    log.unlink(missing_ok=True)
    policy = Policy(processor, "2", "2")
    stopped, unanswered = (Group(processor.prompt(ROW)) for _ in range(2))
    assert RUNNER.run(playing.start([stopped, unanswered], 2)) == [stopped, unanswered]

    async def play() -> None:
        await playing.play_group(unanswered, [], policy.ask, policy)
        answers = [policy.respond(), policy.respond()]
        await asyncio.wait_for(playing.play_group(stopped, answers, policy.ask, policy), 0.5)

    with pytest.raises(TimeoutError):
        RUNNER.run(play())
    RUNNER.run(closed(playing._environments))  # type: ignore[arg-type]
    assert counted(log) == [1] * 4


def test_an_environment_is_closed_whose_start_is_only_checked_or_fails(
    processor: Processor, playing: EpisodeRunner, log: Path
) -> None:
    log.unlink(missing_ok=True)
    RUNNER.run(playing.check_start(processor.prompt(ROW)))
    RUNNER.run(closed(playing._environments))  # type: ignore[arg-type]
    assert counted(log) == [1]
    group = Group(processor.prompt(replace(ROW, answer="no reset")))
    assert RUNNER.run(playing.start([group], 2)) == []
    RUNNER.run(closed(playing._environments))  # type: ignore[arg-type]
    assert counted(log) == [1, 1, 1]


def test_environments_of_episodes_that_are_not_played_are_closed_at_the_end(
    processor: Processor, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    made = episode_runner(processor, graded(), KEEPING, options={"log": str(log)}, workers=1)
    RUNNER.run(made.start([Group(processor.prompt(ROW))], 3))
    RUNNER.run(made.close())
    assert counted(log) == [1, 1, 1]
