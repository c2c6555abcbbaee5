"""The driver's state in a checkpoint, its plans and its evaluations, without servers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.data.loader import PromptStream
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.models.cost import ModelCost
from megavlm.observability.phases import Phases
from megavlm.observability.progress import Progress
from megavlm.parallel.mesh import Layout
from megavlm.rollout.source import make_source
from megavlm.training.driver import Driver
from megavlm.training.step.pack_plan import Schedule
from megavlm.training.step.planner import StepPlanner
from megavlm.training.step.step_plan import PackShape, schedule_of
from tests.support.cache import cached_folder

TEXTS = ["What colour?", "red"] * 20


@pytest.fixture(scope="module")
def model() -> str:
    folder = cached_folder("driver-model", "", lambda path: make_tiny_model(path, TEXTS, seed=0))
    return str(folder)


class OneRank:
    """The mesh of a process without process groups."""

    data_size = world_size = 1

    def __init__(self, config: Config) -> None:
        self.layout = Layout.from_config(config.parallel)


def make_driver(config: Config) -> Driver:
    mesh: Any = OneRank(config)
    hf_config = AutoConfig.from_pretrained(config.model.folder)
    driver = Driver(config, hf_config, mesh, None, Progress(is_quiet=True))
    driver.experience = (
        driver.sampler.prompt_stream()
        if config.rollout.replay is None
        else make_source(driver.sampler, None, driver.curriculum, Phases())
    )
    return driver


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"tensor": 2}, {}),
        ({"tensor": 2, "sequence": True}, {"multiple": 2}),
        ({"context": 4}, {"context_size": 4}),
    ],
)
def test_pack_shape(
    write_recipe: Callable[..., Path], model: str, parallel: dict[str, Any], expected: Any
) -> None:
    config = load(write_recipe(model={"folder": model}, parallel=parallel))
    planner: StepPlanner = make_driver(config).planner
    ids = planner.shape.vision_token_ids
    assert ids and planner.shape == PackShape(vision_token_ids=ids, **expected)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(tensor=2, context=2), {}),
        (Layout(pipeline=2), {"bubble": 1.0}),
        (Layout(pipeline=4, virtual=3), {"bubble": 1.0, "count": 4}),
        (Layout(expert=2), {"lockstep": True}),
        (Layout(expert_tensor=2, tensor=2), {"lockstep": True}),
    ],
)
def test_schedule_of_packs(layout: Layout, expected: dict[str, Any]) -> None:
    cost = ModelCost(10.0, 0.0, 0.0, 0.0)
    assert schedule_of(layout, cost) == Schedule(least_cost=2950.0, **expected)


def test_the_curriculum_and_the_position_in_the_data_are_part_of_the_state(
    write_recipe: Callable[..., Path], model: str, tmp_path: Path
) -> None:
    """A replay keeps the groups that waited at its start."""
    stages = [{"reward": 0.5, "tolerance": 9.0}, {}]
    config = load(
        write_recipe(
            model={"folder": model},
            algorithm={"name": "grpo"},
            rollout={"replay": str(tmp_path / "recorded")},
            curriculum={"stages": stages, "window": 1},
        )
    )
    first, second = make_driver(config), make_driver(config)
    first.curriculum.record(0.7)
    state = first.state_dict()
    state["backlog"] = [{"row": 1, "step": 0, "responses": []}]
    state["skipped"] = {"bad": 3}
    second.start(1, state)
    assert second.curriculum.number == 1
    assert second.state_dict() == state
    second.close()


def take(driver: Driver) -> int:
    assert isinstance(driver.experience, PromptStream)
    (prompt,) = driver.experience.take(1)
    return prompt.row.index


def test_supervised_prompts_go_on_where_a_checkpoint_was_saved(
    write_recipe: Callable[..., Path], model: str
) -> None:
    config = load(write_recipe(model={"folder": model}, algorithm={"name": "sft"}))
    first, second, third = (make_driver(config) for _ in range(3))
    take(first)
    old = {**first.state_dict(), "backlog": []}  # as older checkpoints have it
    second.start(1, first.state_dict())
    third.start(1, old)
    rows = [take(driver) for driver in (first, second, third)]
    assert len(set(rows)) == 1
    second.close()
    third.close()
