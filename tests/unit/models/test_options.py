"""Every key of the recipe that is about the model or its layout reaches it."""

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.config.load import load
from megavlm.config.parallel import Parallel
from megavlm.models.common.config import ModelOptions
from megavlm.parallel.mesh import Layout

WriteRecipe = Callable[..., Path]


def test_a_layout_is_of_the_parallel_section(write_recipe: WriteRecipe) -> None:
    axes = {
        "tensor": 2,
        "pipeline": 3,
        "virtual": 4,
        "context": 5,
        "expert": 6,
        "expert_tensor": 10,
    }
    assert set(axes) == {field.name for field in fields(Layout)}
    assert set(axes) < {field.name for field in fields(Parallel)}
    config = load(write_recipe(parallel=axes))
    assert asdict(Layout.from_config(config.parallel)) == axes
    assert Layout.from_config(config.parallel).model_size == config.parallel.model_size == 30


CHANGED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model": {"dtype": "bfloat16"}}, {"dtype": torch.bfloat16}),
    ({"model": {"attention": "flex"}}, {"attention": "flex"}),
    ({"model": {"freeze_tower": False}}, {"freeze_tower": False}),
    ({"model": {"freeze_merger": False}}, {"freeze_merger": False}),
    ({"parallel": {"tensor": 2, "sequence": True}}, {"sequence": True}),
    (
        {"parallel": {"pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 5}},
        {"first_stage_layers": 3, "last_stage_layers": 5},
    ),
    (
        {"recompute": {"language": "full", "layers": 2}},
        {"recompute": "full", "recompute_layers": 2},
    ),
    (
        {"recompute": {"language": "selective", "modules": ["mlp", "core_attn"]}},
        {"recompute": "selective", "recompute_modules": ("mlp", "core_attn")},
    ),
    ({"recompute": {"tower": True}}, {"recompute_tower": True}),
    ({"lora": {"rank": 4}}, {}),
    ({"lora": {"rank": 4, "targets": ["language.experts"]}}, {}),
]


@pytest.mark.parametrize(("sections", "expected"), CHANGED)
def test_options(
    write_recipe: WriteRecipe, sections: dict[str, Any], expected: dict[str, Any]
) -> None:
    options = ModelOptions.from_config(load(write_recipe(**sections)))
    assert asdict(options) == asdict(ModelOptions()) | expected


@pytest.mark.parametrize(
    ("parallel", "works"),
    [
        ({"expert_tensor": 2}, False),
        ({"expert_tensor": 4, "tensor": 2}, False),
        ({"expert_tensor": 2, "tensor": 2}, True),
        ({"expert_tensor": 2, "context": 2}, True),
        ({"expert": 2}, True),
    ],
)
def test_a_cpu_does_not_cut_experts_over_data_ranks(
    write_recipe: WriteRecipe, parallel: dict[str, int], works: bool
) -> None:
    config = load(write_recipe(parallel=parallel))
    if works:
        Layout.from_config(config.parallel)
    else:
        with pytest.raises(ValueError, match=r"gloo needs equal numbers: on a CPU set it"):
            Layout.from_config(config.parallel)
