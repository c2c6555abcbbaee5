"""The examples in the guides to environments, rewards and agents work as they say."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.environment import EnvironmentConfig
from megavlm.config.load import load
from megavlm.config.reward import Reward
from megavlm.config.schema import Config
from megavlm.data.rows import Row
from megavlm.environments import registry
from megavlm.environments.agent import Agent
from megavlm.environments.base import Context, Environment, Observation
from megavlm.environments.tools.load import load_tools
from megavlm.evaluation.attempts import Attempt, Candidate, Question, SkippedRows
from megavlm.import_path import import_object
from megavlm.rewards.base import Example, ResponseDetails, Score
from megavlm.rewards.manager import Part, RewardManager
from megavlm.rewards.registry import check_options, check_reward_row
from megavlm.rollout.rewards import make_reward_manager, reward_parts, used_tasks
from tests.conftest import png
from tests.docs.test_tutorial import FENCE, ROOT
from tests.support.browsers import act, needs_chromium
from tests.support.timeouts import scaled
from tests.unit.environments.adapters.played import parts, play


@pytest.fixture(autouse=True)
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the guide's files to the working directory, where nothing else imports them."""
    for guide in ("environments", "agents", "browser"):
        text = (ROOT / f"docs/guides/{guide}.md").read_text(encoding="utf-8")
        for _, title, block in FENCE.findall(text):
            if title:
                (tmp_path / title).parent.mkdir(exist_ok=True)
                (tmp_path / title).write_text(block, encoding="utf-8")
    base = "environment: {name: single_turn}\n"
    (tmp_path / "mine.yaml").write_text(base, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def counting() -> Config:
    config: Config = load(Path("counting.yaml"), ["model.folder=x"])
    return config


def test_the_guide_s_task_scores_by_its_own_reward(counting: Config) -> None:
    assert [part.name for part in reward_parts(counting)] == ["counting"]
    manager = make_reward_manager(counting)

    async def score() -> list[Score]:
        texts = ("I count 3.", "There are 5", "none")
        found = [await manager.score(text, Example("How many?", "3")) for text in texts]
        await manager.close()
        return found

    right, off, none = asyncio.run(score())
    assert right == Score(1.0, True)
    assert (off.reward, off.correct, none.reward) == (pytest.approx(0.6), False, 0.0)


def test_the_guide_s_task_checks_options_and_rows() -> None:
    with pytest.raises(ValueError, match="counting's most is 0: set it above 0"):
        check_options("counting", {"most": 0})
    check_reward_row("counting", {"answer": "3"}, {"most": 5})
    with pytest.raises(ValueError, match="the answer 'red' is not a count"):
        check_reward_row("counting", {"answer": "red"}, {"most": 5})


def test_the_guide_s_task_shows_its_table(counting: Config) -> None:
    (task,) = used_tasks(counting)
    assert task.evaluation_page is not None
    questions = [
        Question(
            Row(index, "?", answer, (), "", f"rows:{index}"),
            tuple(Attempt("", 0.0, hit == "x", 1, "stop") for hit in hits),
        )
        for index, (answer, hits) in enumerate((("12", "x-"), ("3", "x"), ("3", "-")))
    ]
    candidate = Candidate("<b>", 1, questions, SkippedRows(), 1.0)
    html = import_object(task.evaluation_page)([candidate], ["<b>"])
    assert re.findall(r"<td>([^<]*)", html) == ["&lt;b&gt;", "3", "50%", "&lt;b&gt;", "12", "50%"]


def test_the_guide_s_ranking_ranks_a_group() -> None:
    manager = RewardManager(
        [Part("right", "exact_match", 0.9), Part("brief", "my_ranking:brief", 0.1)],
        Reward(on_failure="stop", workers=1, timeout=scaled(30), memory_mb=1024),
    )
    lengths = [(3, "stop"), (1, "stop"), (9, "length")]
    details = [ResponseDetails(finish, ("a",), (7,) * length) for length, finish in lengths]
    known = [Score(0.9, True, {"right": 1.0})] * 3

    async def score() -> list[Score]:
        found = await manager.score_group(["a"] * 3, details, known, Example("?", "a"))
        await manager.close()
        return found

    added = asyncio.run(score())
    assert [score.reward for score in added] == pytest.approx([0.05, 0.1, 0.0])
    assert added[0] == Score(added[0].reward, True, {"right": 1.0, "brief": 0.5})


async def nothing(text: str, row: Example) -> Score:
    return Score(0.5, False)


def environment_of(recipe: str | None = None, name: str = "") -> Environment:
    """Make the environment that one of the guide's recipes names, in this process."""
    settings = EnvironmentConfig(name=name, max_turns=4)
    if recipe:
        config: Config = load(Path(recipe), ["model.folder=x", "run.dir=x"])
        settings = config.environment
    cls = registry.load_environment(settings.name, settings.options, settings.tools)
    context = Context(nothing, settings.max_turns, tools=load_tools(settings.tools).functions)
    return registry.make(cls, context, settings.options)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_the_guide_s_environment_is_played() -> None:
    environment = environment_of("guessing.yaml")
    shown = asyncio.run(environment.reset(Example("Hello.", ""), seed=3))
    assert shown.messages[0]["content"] == "Hello. Guess my number, from 1 to 20."
    low, high, turns = 1, 20, 0
    while True:
        guess = (low + high) // 2
        step = asyncio.run(environment.step(str(guess)))
        if step.done:
            break
        assert step.observation is not None and step.reward == -0.05
        if step.observation.messages[0]["content"] == "More.":
            low = guess
        else:
            high = guess
        turns += 1
    assert step.reward == 1.0 and 0 < turns < 6
    assert asyncio.run(environment.step("?")).observation is not None


@pytest.mark.parametrize("name", ["gymnasium", "tools", "openenv", "verifiers"])
def test_the_guide_s_adapters_have_the_options_that_it_shows(name: str) -> None:
    guide = (ROOT / "docs/guides/agents.md").read_text(encoding="utf-8")
    adapters = guide.partition("## Adapters")[2].partition("## Budget")[0]
    blocks = [text for kind, _, text in FENCE.findall(adapters) if kind == "yaml"]
    (block,) = [text for text in blocks if f"name: {name}\n" in text]
    Path("adapter.yaml").write_text(block, encoding="utf-8")
    settings = load(Path("adapter.yaml"), ["model.folder=x", "run.dir=x"]).environment
    if name != "verifiers":  # it is not in the lock file
        assert registry.load_environment(settings.name, settings.options, settings.tools)


def test_the_guide_s_tools_are_called() -> None:
    environment = environment_of("my_tools.yaml")
    shown = asyncio.run(environment.reset(Example("?", ""), seed=0))
    properties = shown.tools[0]["function"]["parameters"]["properties"]
    assert properties["unit"]["enum"] == ["cm", "in", "ft", "m"]
    step = asyncio.run(environment.step(call("convert", length="2", unit="m", to="cm")))
    assert step.observation is not None and step.observation.messages[0]["content"] == "200 cm"
    wrong = asyncio.run(environment.step(call("convert", length=2, unit="mile", to="cm")))
    assert wrong.observation is not None
    assert wrong.observation.messages[0]["content"].startswith("error: convert: unit: ")


@pytest.mark.slow
def test_the_guide_s_mcp_server_is_called() -> None:
    async def steps(session: Any, shown: Observation) -> None:
        assert [tool["function"]["name"] for tool in shown.tools] == ["convert"]
        step = await session.step(call("convert", length=2, unit="m", to="cm"))
        assert parts(step.observation) == "200 cm"

    play("tools", steps, tools=(f"{sys.executable} my_server.py",))


def test_the_guide_s_shop_has_state() -> None:
    environment = environment_of(name="shop:Shop")
    asyncio.run(environment.reset(Example("?", "", extra={"shelf": ["tea", "milk"]}), seed=0))
    for item, said in (
        ("tea", "in the basket: tea"),
        ("rum", "error: rum is sold out"),
        ("milk", "in the basket: tea, milk"),
    ):
        step = asyncio.run(environment.step(call("add", item=item)))
        assert step.observation is not None and step.observation.messages[0]["content"] == said


def test_the_guide_s_agent_is_an_agent() -> None:
    config = load(Path("my_agent.yaml"), ["model.folder=x", "run.dir=x"])
    asyncio.run(Agent(Context(nothing, 1), **config.environment.options).check())
    environment_of("my_agent.yaml")
    assert import_object(config.environment.options["agent"]).__code__.co_varnames[:2] == (
        "base_url",
        "row",
    )


def test_the_guide_s_zoom_has_a_tool_more() -> None:
    config: Config = load(Path("my_zoom.yaml"), ["model.folder=x", "run.dir=x"])
    cls = registry.load_environment(config.environment.name, {})
    environment = registry.make(cls, Context(nothing, 4), {})
    start = asyncio.run(environment.reset(Example("?", "3", images=(png(),)), 0))
    assert [tool["function"]["name"] for tool in start.tools][-1] == "grey"


@needs_chromium
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize(("x", "reward"), [(250, 0.0), (750, 1.0)])
def test_the_guide_s_page_gives_a_reward(x: int, reward: float) -> None:
    config: Config = load(Path("my_page.yaml"), ["model.folder=x", "run.dir=x"])
    row = Example("Buy milk.", "milk", extra={"page": "basket.html"})

    async def steps(session: Any, shown: Observation) -> None:
        step = await session.step(act(action="click", coordinate=[x, 100]))
        assert (step.done, step.reward, step.info["correct"]) == (True, reward, reward > 0)

    play(config.environment.name, steps, row, options=config.environment.options)


def test_the_guide_s_desktop_is_a_screen() -> None:
    cls = registry.load_environment("desktop:Desktop", {"url": "http://x", "marks": True})
    assert {"open", "look", "act", "close"} <= vars(cls).keys()
    registry.make(cls, Context(nothing, 1), {"url": "http://x", "marks": True})
