"""Built-in environments, played by hand with a reward that needs no process."""

import asyncio
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megavlm.environments import registry
from megavlm.environments.base import Context, Environment, Observation, Step
from megavlm.environments.registry import built_in_environments
from megavlm.environments.single_turn import SingleTurn
from megavlm.rewards import registry as rewards
from megavlm.rewards.base import Example, Score

CALL = '<tool_call>\n{"name": "calculator", "arguments": %s}\n</tool_call>'
ROW = Example("<image>How many?", "3", "counting", (b"image",))


async def score(text: str, row: Example) -> Score:
    correct = row.answer in text
    return Score(float(correct), correct)


def start(name: str, max_turns: int = 1, row: Example = ROW, **options: Any) -> Any:
    cls = registry.load_environment(name, options)
    environment = registry.make(cls, Context(score, max_turns), options)
    return environment, asyncio.run(environment.reset(row, 0))


def step(environment: Environment, text: str) -> Step:
    return asyncio.run(environment.step(text))


SINGLE = [name for name, found in built_in_environments().items() if found.starts_from_row]


@pytest.mark.parametrize("name", SINGLE)
def test_single_turns_show_the_row_and_score_the_response(name: str) -> None:
    environment, observation = start(name)
    assert observation == Observation(ROW.messages, ROW.images)
    done = step(environment, "3")
    assert (done.done, done.reward, done.observation) == (True, 1.0, None)
    assert done.info["score"].correct


def test_those_that_start_from_the_row_are_single_turns() -> None:
    for name, built_in in built_in_environments().items():
        assert built_in.starts_from_row == (registry.load_environment(name, {}) is SingleTurn)


def test_every_built_in_environment_loads_and_its_reward_exists() -> None:
    for name, built_in in built_in_environments().items():
        assert registry.find_environment(name) == built_in
        assert inspect.isclass(registry.load_environment(name, {}))
        assert callable(rewards.load_reward(built_in.reward, {}))


def called(expression: str) -> str:
    return f"So:\n{CALL % json.dumps({'expression': expression})}"


def test_the_calculator_is_shown_called_and_answered_with() -> None:
    environment, observation = start("geo3k_calculator", max_turns=9)
    assert observation.messages == ROW.messages and observation.images == ROW.images
    assert [tool["function"]["name"] for tool in observation.tools] == ["calculator"]
    turn = step(environment, called("2 * sqrt(9) ^ 2"))
    assert (turn.done, turn.reward) == (False, 0.0)
    result = {"role": "tool", "content": "18", "name": "calculator"}
    assert turn.observation == Observation([result])
    for expression in ("3 < 4", "__import__('os')"):
        failed = step(environment, called(expression))
        assert failed.observation is not None
        assert failed.observation.messages[0]["content"].startswith("error: only numbers")
    assert step(environment, r"\boxed{3}").reward == 1.0


def test_the_calculator_s_last_turn_is_scored() -> None:
    environment, _ = start("geo3k_calculator", max_turns=1)
    assert step(environment, called("1+1")).done


def test_a_prompt_may_explain_the_calculator_itself() -> None:
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"})
    _, observation = start("geo3k_calculator", row=Example("?", "3", chat=chat), show_tools=False)
    assert (observation.messages, observation.tools) == (chat, ())


def test_a_retry_is_worth_less_each_time_and_may_show_the_image_again() -> None:
    environment, _ = start("vqa_retry", max_turns=3, discount=0.5, message="Again.", show=True)
    again = step(environment, "5")
    assert (again.done, again.reward) == (False, 0.0)
    assert again.observation == Observation([{"role": "user", "content": "Again."}], ROW.images)
    assert not step(environment, "4").done
    assert step(environment, "3").reward == 0.25
    environment, _ = start("vqa_retry", max_turns=2)
    step(environment, "5")
    assert step(environment, "5").done


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("geo4k", {}, "environment.name='geo4k' is unknown"),
        ("megavlm.nowhere:Class", {}, "it cannot be imported"),
        ("megavlm.environments.base:Class", {}, "it cannot be imported"),
        ("megavlm.environments.base:Step", {}, "has not reset and step as async methods"),
        (
            "vqa_retry",
            {"discont": 1},
            "environment.options.discont.*it has discount, message",
        ),
    ],
)
def test_what_cannot_be_had_is_one_sentence(
    name: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        registry.find_environment(name)
        registry.load_environment(name, options)


def test_no_reward_and_no_environment_brings_torch() -> None:
    code = (
        "import sys\n"
        "from megavlm.environments.registry import built_in_environments, load_environment\n"
        "from megavlm.rewards.registry import BUILT_IN_REWARDS, BUILT_IN_TASKS, load_reward\n"
        "import megavlm.rewards.manager\n"
        "for name in built_in_environments(): load_environment(name, {})\n"
        "for name in (*BUILT_IN_REWARDS, *BUILT_IN_TASKS): load_reward(name, {})\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_module_of_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_place.py").write_text(
        "from megavlm.environments.single_turn import SingleTurn\nclass Mine(SingleTurn): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert registry.load_environment("my_own_place:Mine", {}).__name__ == "Mine"
