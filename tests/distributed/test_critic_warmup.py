"""Updates of a value head alone leave no trace in what they do not train: not in the policy's
weights, nor in how its first update is made, nor in its schedule.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megavlm.config.optimizer import Optimizer
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.parallel.mesh import build_mesh
from megavlm.training.optimizer import build_updater
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.table import LAYOUTS
from tests.support.fork import launch

pytestmark = pytest.mark.distributed
Found = dict[str, list[Any]]  # tensors, which come back as arrays


def train(folder: Path, warmup: int) -> tuple[Found, list[float], bool]:
    """Weights at the start, after the head's updates alone, and after each of two of everything;
    the policy's rate in those two.
    """
    mesh = build_mesh(LAYOUTS["one rank"].mesh)
    config = inputs_of(folder).config
    torch.manual_seed(0)
    model = build_model(config, mesh, ModelOptions(head="both"))
    for chunk in model:
        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    settings = Optimizer(lr=1e-3, warmup_steps=4, clip_grad=0.0)
    updater = build_updater(model, settings, mesh, num_steps=20, value_head_lr=1e-2)
    named = [(n, p) for chunk in model for n, p in chunk.named_parameters() if p.requires_grad]
    found: Found = {"policy": [], "head": []}

    def note() -> None:
        for name in found:
            mine = [p for n, p in named if ("value_head" in n) == (name == "head")]
            found[name].append(torch.cat([p.detach().flatten().clone() for p in mine]))

    def gradients(seed: int, *, alone: bool) -> None:
        updater.zero_gradients()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in named:
            if not alone or "value_head" in name:
                parameter.main_grad.normal_(generator=generator)

    note()
    for seed in range(warmup):
        gradients(seed, alone=True)
        updater.step(value_head_alone=True)
    note()
    has_moved, rates = updater.has_moved, []
    for seed in (50, 51):
        gradients(seed, alone=False)
        rates.append(updater.learning_rate)
        updater.step()
        note()
    # A checkpoint has one count for all of them.
    updater.optimizer.state_dict()
    return found, rates, has_moved


def test_the_policy_s_first_updates_are_as_without_the_critic_s_warm_up() -> None:
    folder = model_folder("qwen2_5_vl")
    ((plain, rates, _),) = launch(1, train, folder, 0)
    ((warmed, their_rates, has_moved),) = launch(1, train, folder, 5)
    assert rates == their_rates and not has_moved
    for mine, theirs in zip(plain["policy"], warmed["policy"], strict=True):
        assert np.array_equal(mine, theirs)
    assert not np.array_equal(plain["policy"][1], plain["policy"][2])
    start, after = warmed["head"][:2]
    # Five updates of about the head's rate each.
    assert 0.02 < np.abs(after - start).max() < 0.06
