"""What the driver asks of packs is what the layout needs."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megavlm.config.load import load
from megavlm.environments.curriculum import Curriculum
from megavlm.models.cost import ModelCost
from megavlm.parallel.mesh import Layout
from megavlm.training.driver import Driver
from megavlm.training.step.pack_plan import Schedule
from megavlm.training.step.step_plan import PackShape, schedule_of

VISION = (7, 8)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"tensor": 2}, {}),
        ({"tensor": 2, "sequence": True}, {"multiple": 2}),
        ({"context": 4}, {"context_size": 4}),
    ],
)
def test_pack_shape(
    write_recipe: Callable[..., Path], parallel: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = load(write_recipe(parallel=parallel, data={"pack_tokens": 9000}))
    driver: Any = SimpleNamespace(
        config=config,
        mesh=SimpleNamespace(layout=Layout.from_config(config.parallel)),
        processor=SimpleNamespace(vision_token_ids=VISION),
    )
    assert Driver.shape.fget is not None
    assert Driver.shape.fget(driver) == PackShape(vision_token_ids=VISION, **expected)


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


def test_the_curriculum_is_part_of_the_state(write_recipe: Callable[..., Path]) -> None:
    stages = [{"reward": 0.5, "tolerance": 9.0}, {}]
    config = load(write_recipe(curriculum={"stages": stages, "window": 1}))

    def driver() -> Any:
        other = SimpleNamespace(state_dict=lambda: {"drawn": 3}, load_state_dict=lambda *_: None)
        return SimpleNamespace(
            config=config,
            producer=None,
            stream=other,
            partial_rollouts=other,
            curriculum=Curriculum(config.curriculum),
        )

    first, second = driver(), driver()
    first.curriculum.record(0.7)
    state = Driver.state_dict(first)
    Driver.start(second, 1, state)
    assert second.curriculum.number == 1
    second.metrics.close()
