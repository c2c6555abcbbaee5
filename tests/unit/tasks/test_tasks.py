"""Tasks by name: the built-in ones, and a package of a user's own."""

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megavlm.config.environment import EnvironmentConfig
from megavlm.environments.processes import EnvironmentPool, Local, make_environments
from megavlm.environments.registry import find_environment
from megavlm.import_path import import_object
from megavlm.rewards.registry import BUILT_IN_REWARDS, check_reward_name, check_reward_row
from megavlm.task import BUILT_IN_TASKS, Task, built_in_tasks, find_task
from tests.unit.test_dependencies import MODULES

PACKAGES = {
    "plain": "TASK = Task(reward='plain:score')",
    "two_tries": "TASK = Task(reward='plain:score', environment='megavlm.tasks.vqa.retry:Retry')",
    "own": (
        "from megavlm.environments.single_turn import SingleTurn\n"
        "class Mine(SingleTurn): pass\n"
        "TASK = Task(reward='plain:score', environment='own:Mine')"
    ),
    "nothing": "",
    "misspelt": "TASK = Task(reward='plain:score', check_row='misspelt.rewad:check_row')",
    "broken": "import nowhere_at_all",
}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, source in PACKAGES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            f"from megavlm.task import Task\n{source}\n", encoding="utf-8"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in PACKAGES:
        sys.modules.pop(name, None)


def test_what_a_built_in_task_names_is_there() -> None:
    for name, task in built_in_tasks().items():
        parts = (task.check_options, task.check_row, task.prepare_options, task.evaluation_page)
        for path in (task.reward, task.environment, *task.variants.values(), *filter(None, parts)):
            assert callable(import_object(path)), f"{name}: {path}"


def test_a_package_of_one_s_own_is_a_task_everywhere() -> None:
    assert find_task("plain") == Task(reward="plain:score")
    check_reward_name("plain")
    found = find_environment("plain")
    assert (found.reward, found.starts_from_row, found.is_built_in) == ("plain", True, True)
    assert not find_environment("two_tries").starts_from_row


@pytest.mark.parametrize(
    ("name", "kind"), [("plain", Local), ("two_tries", Local), ("own", EnvironmentPool)]
)
def test_a_class_of_one_s_own_runs_in_processes(name: str, kind: type) -> None:
    async def made() -> type:
        environments = await make_environments(EnvironmentConfig(name=name, workers=1))
        await environments.close()
        return type(environments)

    assert asyncio.run(made()) is kind


def test_a_package_that_is_no_task_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="the package nothing is not a task: give it TASK"):
        find_task("nothing")
    with pytest.raises(ValueError, match="the task broken cannot be imported: No module named"):
        find_task("broken")
    with pytest.raises(
        ValueError, match=r"a task names misspelt\.rewad:check_row, but it cannot be"
    ):
        check_reward_row("misspelt", {}, {})
    assert find_task("nowhere_at_all") is find_task("plain.nowhere") is None
    with pytest.raises(ValueError, match=r"reward\.name='nowhere_at_all' is unknown"):
        check_reward_name("nowhere_at_all")
    for name in (*BUILT_IN_REWARDS, "https://host/score", "plain:score"):
        check_reward_name(name)


def test_no_other_module_names_a_task() -> None:
    names = set(BUILT_IN_TASKS) - {"caption"}  # a word of its own
    for path, module in MODULES:
        if not re.match(r"megavlm\.(tasks?|demo)\b", module):
            found = names & set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
            assert not found, f"{module} names {found}"
