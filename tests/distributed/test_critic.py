"""A critic of its own: it starts from the policy's weights with a head that says 0, learns, and
comes back bit for bit.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.checkpointing.folder import complete_steps
from megavlm.config.algorithm import PPO
from megavlm.config.load import load
from megavlm.data.packs.packing import make_pack
from megavlm.data.packs.trees import prompt_tree
from megavlm.observability.phases import Phases
from megavlm.observability.progress import Progress
from megavlm.parallel.mesh import Layout, build_mesh
from megavlm.training.critic import Critic
from megavlm.training.losses import critic_loss
from megavlm.training.step.rank_images import RankImages
from megavlm.training.step.vision_features import VisionFeatures
from megavlm.training.train_state import TrainState
from tests.conftest import row, write_rows
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import distinct_images
from tests.support.columns import columns
from tests.support.families import vision_tokens
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = pytest.mark.distributed


class Run:
    def __init__(self, recipe: Path) -> None:
        config = load(recipe)
        assert isinstance(config.algorithm, PPO)
        self.settings = config.algorithm
        self.train_state = TrainState.build(
            config,
            build_mesh(Layout.from_config(config.parallel), seed=0),
            Progress(is_quiet=True),
            Phases(),
        )
        self.critic = Critic(self.train_state, self.settings)
        self.train_state.resume()
        self.critic.resume()
        cases = inputs_of(Path(config.model.folder)).sequences("one image")
        mesh, hf = self.train_state.mesh, self.train_state.hf_config
        mine = cases[mesh.data_rank :: mesh.data_size]
        tokens = vision_tokens(hf)
        trees = [
            prompt_tree(case.prompt, case.responses, [columns(len(r)) for r in case.responses])
            for case in mine
        ]
        self.pack = make_pack(trees, vision_token_ids=tokens, context_size=mesh.layout.context)
        self.pack = self.pack.part(mesh.context_rank)
        images = RankImages.everywhere(distinct_images(cases), mesh.groups.tp_cp.size())
        features = VisionFeatures(self.train_state.updater.chunks, images)
        self.features = self.critic.features(features, images)
        assert self.features is features, "a frozen tower's features are the policy's"

    def values(self) -> torch.Tensor:
        self.critic.add_values([self.pack], self.features)
        assert self.pack.columns is not None and self.pack.columns.values is not None
        return self.pack.columns.values.clone()

    def update(self) -> float:
        """Towards 1 everywhere, from the values of now."""
        ones = torch.ones_like(self.values())
        assert self.pack.columns is not None
        self.pack.columns = replace(self.pack.columns, returns=ones, loss_weights=ones / 20)
        loss = critic_loss(self.settings)
        measures = self.critic.updater.update([self.pack], self.features, loss, step=1)
        return measures["value_loss"]

    def save(self) -> None:
        self.train_state.step += 1
        self.train_state.save(None, {}, self.critic.begin_save)
        self.train_state.saver.finish()

    def state(self) -> list[torch.Tensor]:
        return [p.detach().clone() for chunk in self.critic.model for p in chunk.parameters()]


def learn_and_resume(recipe: Path) -> list[Any]:
    run = Run(recipe)
    start = run.values()
    losses = [run.update() for _ in range(3)]
    policy = [p.detach().clone() for chunk in run.train_state.model for p in chunk.parameters()]
    run.save()
    saved, uninterrupted = run.state(), [run.update(), run.update()]
    values = run.values()

    again = Run(recipe)
    assert again.train_state.step == 1
    same = all(torch.equal(x, y) for x, y in zip(saved, again.state(), strict=True))
    resumed = [again.update(), again.update()]
    now = [p for chunk in again.train_state.model for p in chunk.parameters()]
    unmoved = all(torch.equal(x, y) for x, y in zip(policy, now, strict=True))
    again.save()
    steps = complete_steps(recipe.parent / "run/critic_checkpoints")
    equal = torch.equal(values, again.values())
    return [start.any().item(), losses, same, uninterrupted == resumed, equal, unmoved, steps]


@pytest.mark.parametrize("parallel", [{"data": 2}, *slow({"context": 2})])
def test_a_critic_learns_and_resumes(tmp_path: Path, parallel: dict[str, int]) -> None:
    sections = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"folder": str(model_folder("qwen2_5_vl"))},
        "data": {"train_files": [str(write_rows(tmp_path / "rows.parquet", [row()]))]},
        "parallel": parallel,
        "algorithm": {"name": "ppo", "critic_lr": 1e-3, "value_clip": None, "kl_coefficient": 0},
        "checkpoint": {"keep_last": 1},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(sections))
    for result in launch(2, learn_and_resume, recipe):
        said, losses, *same, steps = result
        assert said is False, "it starts at zero"
        assert losses[0] == pytest.approx(0.5) and losses[0] > losses[1] > losses[2]
        assert same == [True, True, True, True]
    assert steps in ([1, 2], [2])
