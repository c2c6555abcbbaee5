"""A step reads on one screen: few frames of ours between it, the request and the push."""

import inspect
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megavlm
from megavlm.config.algorithm import GRPO
from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import Sampling
from megavlm.rollout.episodes import EpisodeRunner
from megavlm.rollout.trajectory import Episode, Group
from megavlm.training import policy_trainer, weight_push
from megavlm.training.policy_trainer import PolicyTrainer
from megavlm.training.weight_push import WeightPusher
from megavlm.weight_sync.sync import WeightSync

ROOT = Path(megavlm.__file__).parent


def our_frames() -> list[str]:
    """Names of the functions under megavlm/ that are running, outermost first."""
    stack = inspect.stack(context=0)
    return [f.function for f in reversed(stack) if Path(f.filename).is_relative_to(ROOT)]


class Client:
    """Notes its callers in place of the requests."""

    def generate(self, prompts: Any, **options: Any) -> Any:
        self.frames = [*our_frames(), "generate"]
        return [[] for _ in prompts]


class Sync:
    """Notes its callers in place of the push."""

    version = None

    def update_weights(self, step: int) -> None:
        self.frames = [*our_frames(), "update_weights"]


def start_groups(groups: list[Group], n: int, step: int) -> list[Group]:
    for group in groups:
        group.episodes = [Episode(group.prompt)]
    return groups


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer with everything below `train_step` replaced but what leads to the two calls."""
    monkeypatch.setattr(weight_push, "broadcast_object", lambda value, mesh: value)
    for name in ("rollout_metrics", "sample_records"):
        monkeypatch.setattr(policy_trainer, name, lambda *_: {})
    trainer: Any = PolicyTrainer.__new__(PolicyTrainer)
    batch = SimpleNamespace(images=None, num_tokens=1)
    monkeypatch.setattr(trainer, "share", lambda plan: batch, raising=False)
    monkeypatch.setattr(trainer, "encode", lambda batch: None, raising=False)
    for name in ("plan", "add_reference_logprobs", "add_old_logprobs", "add_advantages", "update"):
        monkeypatch.setattr(trainer, name, lambda *_: {}, raising=False)
    monkeypatch.setattr(trainer, "record", lambda *_, **options: None, raising=False)
    mesh = SimpleNamespace(is_driver=True, context_rank=0)
    config = SimpleNamespace(
        run=SimpleNamespace(record_rollouts=False),
        rollout=SimpleNamespace(
            oversample=1.0, lora="merged", pause="abort", replay=None, timed_out="fail"
        ),
    )
    trainer.train_state = SimpleNamespace(
        step=0,
        config=config,
        mesh=mesh,
        phases=lambda _: nullcontext(),
        updater=SimpleNamespace(chunks=[], finish=lambda: None),
    )
    runner: Any = EpisodeRunner.__new__(EpisodeRunner)
    trainer.driver = SimpleNamespace(
        client=Client(),
        processor=SimpleNamespace(pieces=None),
        producer=None,
        episode_runner=runner,
        start_groups=start_groups,
        stream=SimpleNamespace(take=None),
        partial_rollouts=SimpleNamespace(
            take=lambda count, draw: [Group(SimpleNamespace())] * count,  # type: ignore[arg-type]
            split=lambda groups: groups,
        ),
    )
    trainer.sampling, trainer.settings = Sampling(1.0, 4), GRPO(prompts_per_step=1)
    pool: Any = SimpleNamespace(wait_for_targets=lambda: 0)
    sync: Any = Sync()
    trainer.weights = WeightPusher(trainer.train_state, sync, pool, None)
    return trainer


def test_at_most_five_frames_from_the_step_to_the_client(trainer: Any) -> None:
    trainer.train_step()
    frames = trainer.driver.client.frames
    assert frames == ["train_step", "run_on_driver", "sample", "play", "generate"]
    assert callable(RolloutClient.generate), "the fake's name is the client's"


def test_at_most_three_frames_from_the_step_to_the_push(trainer: Any) -> None:
    trainer.train_step()
    assert trainer.weights._sync.frames == ["train_step", "push", "update_weights"]
    assert callable(WeightSync.update_weights), "the fake's name is the real one's"
