"""A reward that misbehaves is killed by its limit, and scored by policy; the next one is served."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megavlm.config.load import load
from megavlm.config.reward import Reward
from megavlm.rewards.base import Example, Score
from megavlm.rewards.manager import Part, RewardManager
from megavlm.rollout.rewards import make_reward_manager
from tests.support.timeouts import scaled

FAULTY = "user_rewards:faulty"
EXAMPLE = Example("?", "red")


def make(on_failure: str = "zero", timeout: float = 1.0, name: str = FAULTY) -> RewardManager:
    return RewardManager(
        [Part("only", name)],
        Reward(on_failure=on_failure, workers=1, timeout=timeout, memory_mb=1024),  # type: ignore[arg-type]
    )


def score(manager: RewardManager, response: str) -> Score:
    return asyncio.run(manager.score(response, EXAMPLE))


@pytest.fixture(scope="module")
def manager() -> Iterator[RewardManager]:
    manager = make()
    yield manager
    asyncio.run(manager.close())
    assert not mine(), "a reward process outlives the manager"


def mine() -> list[psutil.Process]:
    """Processes that rewards of this test process run in, or have started."""
    found = []
    for process in psutil.process_iter():
        try:
            words, status = process.cmdline(), process.status()
            parents = [parent.pid for parent in process.parents()]
        except psutil.Error:
            continue
        is_worker = "megavlm.rewards.worker" in words and os.getpid() in parents
        is_left = words == ["/bin/sleep", f"1000.{os.getpid()}"]
        if status != psutil.STATUS_ZOMBIE and (is_worker or is_left):
            found.append(process)
    return found


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        ("loop", "timeout"),
        ("sleep", "timeout"),
        ("allocate", "memory"),
        ("fork", "timeout"),
        ("hide", "timeout"),
        ("flood", "output"),
        ("raise", "exception"),
        ("exit", "exception"),
        ("die", "crash"),
        ("nan", "value"),
        ("infinite", "value"),
        ("huge", "exception"),
        ("text", "exception"),
        ("nothing", "exception"),
    ],
)
def test_a_fault_is_scored_by_policy_and_the_next_response_is_served(
    manager: RewardManager, response: str, kind: str
) -> None:
    before = manager.failures[kind]
    assert score(manager, response) == Score(0.0, False, failure=kind)
    assert manager.failures[kind] == before + 1
    assert score(manager, "plain") == Score(1.0, True)
    assert len(mine()) == 1, "what the reward started died with it"


@pytest.mark.parametrize("response", ["leave a child", "leave a daemon"])
def test_a_child_that_is_left_behind_dies_and_the_reward_counts(
    manager: RewardManager, response: str
) -> None:
    assert score(manager, response).correct
    assert score(manager, "plain").correct
    assert len(mine()) == 1


def test_printing_is_no_fault_and_a_process_is_kept(manager: RewardManager) -> None:
    assert score(manager, "pid") == score(manager, "pid")
    assert score(manager, "print") == Score(1.0, True)


def test_bytes_arrive_as_bytes_and_other_objects_not_at_all(manager: RewardManager) -> None:
    mask = b"\x89PNG\x00\xff"
    row = replace(EXAMPLE, extra={"mask": mask, "deep": [{"bytes": mask}]})
    assert asyncio.run(manager.score("mask", row)) == Score(1.0, True)
    pid = score(manager, "pid")
    odd = asyncio.run(manager.score("plain", replace(EXAMPLE, extra={"odd": object()})))
    assert odd.failure == "value" and score(manager, "pid") == pid, "the process is kept"


def test_a_megabyte_goes_in(manager: RewardManager) -> None:
    assert score(manager, "x" * 2**20).correct


def test_no_key_of_the_trainer_reaches_a_reward(
    manager: RewardManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAVLM_API_KEY", "secret")
    score(manager, "die")
    seen = set(score(manager, "environment").parts)
    assert "PATH" in seen and not any("KEY" in name for name in seen)


def test_a_recipe_says_what_a_failure_is_worth(write_recipe: Callable[..., Path]) -> None:
    reward = {"name": FAULTY, "failure_value": -0.5}
    for policy in ("zero", "skip"):
        manager = make_reward_manager(load(write_recipe(reward=reward | {"on_failure": policy})))
        found = Score(-0.5, False, failure="exception", skipped=policy == "skip")
        assert score(manager, "raise") == found
        asyncio.run(manager.close())


def test_the_thread_that_made_a_manager_may_end() -> None:
    managers: list[RewardManager] = []
    thread = threading.Thread(target=lambda: managers.append(make()))
    thread.start()
    thread.join()
    assert score(managers[0], "plain").correct, "the pool's own thread keeps it"
    asyncio.run(managers[0].close())


TRAINER = """
import asyncio, sys
from megavlm.config.reward import Reward
from megavlm.rewards.base import Example
from megavlm.rewards.manager import Part, RewardManager
parts = [Part("r", "user_rewards:faulty")]
manager = RewardManager(parts, Reward(on_failure="stop", workers=1, timeout=60, memory_mb=1024))
print(int(asyncio.run(manager.score("pid", Example("?", "red"))).reward), flush=True)
asyncio.run(manager.score("mark and sleep", Example("?", "red", extra={"mark": sys.argv[1]})))
"""


def test_a_trainer_that_is_killed_leaves_no_reward_process(tmp_path: Path) -> None:
    mark = tmp_path / "asleep"
    words = [sys.executable, "-c", TRAINER, str(mark)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        reward = psutil.Process(int(trainer.stdout.readline()))
        while not mark.exists():  # a process at rest would end with its stream
            time.sleep(0.01)
        trainer.kill()
    assert psutil.wait_procs([reward], timeout=scaled(120))[1] == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("user_rewards:missing", "AttributeError"),
        ("nowhere:f", "ModuleNotFoundError"),
        ("user_rewards:SINK", "is not a function"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_one_sentence(name: str, problem: str) -> None:
    before = len(mine())
    with pytest.raises(ValueError, match=problem):
        make(name=name)
    assert len(mine()) == before
