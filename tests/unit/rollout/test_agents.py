"""Episodes that an agent plays through the gateway, in a process with OpenAI's client."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from megavlm.config.algorithm import GRPO
from megavlm.data.processor import Processor
from megavlm.inference.protocol import Response
from megavlm.inference.requests import RequestTimedOut
from megavlm.rewards.base import RewardStop
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.groups import policy_trees, rollout_metrics, sample_records
from megavlm.rollout.trajectory import Group
from tests.support.timeouts import scaled
from tests.unit.rollout.scripted import ROW, RUNNER, Policy, episode_runner, fails, graded

SETTINGS: dict[str, Any] = {
    "timeout": scaled(20),
    "max_turns": 4,
    "max_tokens": 512,
    "workers": 1,
    "memory_mb": 2048,
}


class Scripted(Policy):
    """Is asked by agents alone."""

    async def on_complete(self, answers: Sequence[list[Response]], on_complete: Any) -> None:
        assert not any(answers)
        await asyncio.gather(*(on_complete(index, [], self.ask) for index in range(len(answers))))

    async def ask(self, prompt: Any, most: int | None = None, **_: Any) -> Response:
        return await super().ask(prompt)


def play(
    processor: Processor,
    policy: Policy,
    options: dict[str, Any],
    manager: RewardManager | None = None,
    n: int = 1,
    **settings: Any,
) -> Group:
    playing = episode_runner(
        processor, manager or graded(), "gateway", options=options, **(SETTINGS | settings)
    )
    group = Group(processor.prompt(ROW))
    try:
        RUNNER.run(playing.play(RUNNER.run(playing.start([group], n)), policy))
    finally:
        RUNNER.run(playing.close())
    return group


def agent(name: str) -> dict[str, Any]:
    return {"agent": f"agents:{name}"}


def test_an_agents_calls_are_the_turns_of_an_episode(processor: Processor) -> None:
    class ByTurn(Scripted):
        async def ask(self, prompt: Any, most: int | None = None, **_: Any) -> Response:
            is_first = prompt.token_ids.equal(processor.prompt(ROW).token_ids)
            self.texts.append("4" if is_first else "3")
            return await super().ask(prompt)

    group = play(processor, ByTurn(processor), agent("looks_twice"), n=2)
    for episode in group.episodes:
        assert episode.texts == ["4", "3"] and episode.rewards == [0.0, 1.0]
        assert episode.score.correct and episode.has_ended and episode.environment is None
        assert episode.prompts[0].token_ids.equal(processor.prompt(ROW).token_ids)
    (tree,) = policy_trees([group], GRPO(), max_new_tokens=8, max_turns=4)
    assert [s.parent for s in tree.segments] == [-1, 0, 1, 2, 0, 4, 5]
    metrics = rollout_metrics([group])
    assert metrics["turns"] == 2 and metrics["episode/branches"] == 0
    (record,) = sample_records([group], processor.pieces)
    assert [turn["text"] for turn in record["responses"][0]["turns"]] == ["3"]


@pytest.mark.parametrize(
    ("name", "texts", "reward"),
    [("grades_itself", ["3", "3"], 1.0), ("counts", ["3"], 0.25), ("posts", ["3"], 0.75)],
)
def test_results_of_agents_are_rewards(
    processor: Processor, name: str, texts: list[str], reward: float
) -> None:
    (episode,) = play(processor, Scripted(processor, *texts), agent(name)).episodes
    assert episode.score.reward == reward and episode.texts == texts
    assert episode.score.correct == (reward == 1)
    assert episode.score.parts == ({"right": 2.0} if name == "grades_itself" else {})


@pytest.mark.parametrize(
    ("name", "kind", "num_trained"),
    [
        ("crashes", "exception", 1),
        ("returns_nothing", "exception", 1),
        ("crashes_at_once", "value", 0),
    ],
)
def test_the_failure_of_an_agent_is_that_of_its_episode(
    processor: Processor, name: str, kind: str, num_trained: int
) -> None:
    manager = graded()
    group = play(processor, Scripted(processor, "3"), agent(name), manager)
    (episode,) = group.episodes
    assert episode.score.failure == kind and episode.score.reward == 0
    assert episode.score.skipped == (not num_trained), "what no agent asked for is not trained on"
    assert manager.failures[kind] == 1
    (tree,) = policy_trees([group], GRPO(), max_new_tokens=8)
    weights = [s.columns.loss_weights.sum() for s in tree.segments if s.columns is not None]
    assert [bool(weight) for weight in weights] == [bool(num_trained)]
    with pytest.raises(RewardStop):
        play(processor, Scripted(processor, "3"), agent(name), fails("stop"))


def test_an_agent_has_a_time_limit_and_is_closed(processor: Processor) -> None:
    policy = Scripted(processor, "3", "3")
    (episode,) = play(processor, policy, agent("never_ends"), timeout=scaled(4)).episodes
    assert episode.score.failure == "timeout" and len(episode.responses) == 2
    assert_nothing_runs()


def test_time_that_an_agent_waits_for_responses_does_not_count(processor: Processor) -> None:
    class Slow(Scripted):
        async def ask(self, prompt: Any, most: int | None = None, **_: Any) -> Response:
            await asyncio.sleep(scaled(5))
            return await super().ask(prompt)

    policy = Slow(processor, "3")
    (episode,) = play(processor, policy, agent("counts"), timeout=scaled(4)).episodes
    assert episode.score.failure is None


def test_an_episode_whose_request_times_out_is_left_unplayed(processor: Processor) -> None:
    class Unanswered(Scripted):
        async def ask(self, prompt: Any, most: int | None = None, **_: Any) -> Response:
            raise RequestTimedOut("no answer")

    group = play(processor, Unanswered(processor), agent("looks_twice"))
    assert not group.episodes[0].has_ended
    assert_nothing_runs()


COMMAND = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
assert os.environ["OPENAI_API_KEY"] in os.environ["OPENAI_BASE_URL"]
assert open(row["images"][0], "rb").read(4) == b"\\x89PNG" and row["answer"] == "3"
assert row.get("mask", {"base64": "AP8="}) == {"base64": "AP8="}
if "wait" in sys.argv:
    import subprocess, time
    subprocess.Popen(["sleep", "3600"])
    print("waiting", flush=True)
    time.sleep(3600)
body = {"model": "any", "messages": [{"role": "user", "content": "How many?"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(json.dumps({"reward": 0.5}) if "grade" in sys.argv else answer)
sys.exit(3 if "fail" in sys.argv else 0)
"""


@pytest.mark.parametrize(("word", "reward"), [("", 1.0), ("grade", 0.5), ("fail", 0.0)])
def test_a_command_is_an_agent(processor: Processor, word: str, reward: float) -> None:
    options = {"command": [sys.executable, "-c", COMMAND, word]}
    (episode,) = play(processor, Scripted(processor, "3"), options).episodes
    assert episode.score.reward == reward
    assert episode.score.failure == ("exception" if word == "fail" else None)


def test_a_command_that_takes_too_long_is_killed_with_its_children(processor: Processor) -> None:
    options = {"command": [sys.executable, "-c", COMMAND, "wait"]}
    group = play(processor, Scripted(processor, "3"), options, timeout=scaled(4))
    assert group.episodes[0].score.skipped
    assert_nothing_runs()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "needs either environment.options.agent"),
        ({"agent": "agents:nobody"}, "agents:nobody cannot be imported"),
        ({"command": "python agent.py"}, "must be a list of words"),
        ({"agent": "agents:counts", "port": 1}, "takes no such option"),
        ({"agent": "agents:counts", "host": "192.0.2.1"}, "cannot be bound"),
    ],
)
def test_options_are_checked_at_the_start(
    processor: Processor, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        episode_runner(processor, graded(), "gateway", options=options, **SETTINGS)


def assert_nothing_runs() -> None:
    """No process of an agent is left."""
    left = [p for p in psutil.Process().children(recursive=True) if p.is_running()]
    agents = [p.cmdline() for p in left if "sleep" in p.name() or "megavlm.environments" in str(p)]
    assert not agents


RUNS_A_COMMAND = """
import asyncio, os, sys, time
from megavlm.environments.agent import Agent
from megavlm.rewards.base import Example

# The new process takes so long until it asks the kernel for anything.
os.register_at_fork(after_in_child=lambda: time.sleep(float(sys.argv[1])))
agent = Agent(None, command=["sleep", "3600"])
asyncio.run(agent.reset(Example("?", "3"), 0))
asyncio.run(agent.step("http://127.0.0.1:1/s/key/v1"))
"""


@pytest.mark.parametrize("delay", ["0", "0.5"])
def test_a_command_ends_when_the_process_that_runs_it_is_killed(delay: str) -> None:
    with subprocess.Popen([sys.executable, "-c", RUNS_A_COMMAND, delay]) as runs:
        process, deadline = psutil.Process(runs.pid), time.monotonic() + scaled(60)
        while not (children := process.children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        runs.kill()
        _, left = psutil.wait_procs(children, timeout=scaled(10))
    assert not left
