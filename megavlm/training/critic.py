"""A critic of its own: a second model, with a value head in place of the output layer, that starts
from the policy's weights and is trained and saved beside it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megavlm import checkpointing
from megavlm.checkpointing import Saving, atomic
from megavlm.checkpointing.folder import complete_steps, step_folder
from megavlm.config.algorithms import PPO
from megavlm.data.packing import Pack
from megavlm.models.common.logprobs import Scoring
from megavlm.training.forward_backward import LossFunction, VisionFeatures, compute_logprobs
from megavlm.training.guards import SkipCounter
from megavlm.training.initial_model import start_model
from megavlm.training.optimizer import build_updater
from megavlm.training.train_state import TrainState
from megavlm.training.update import update

CHECKPOINTS = "critic_checkpoints"


class Critic:
    def __init__(self, train_state: TrainState, settings: PPO) -> None:
        """At the run's start."""
        config = train_state.config
        self._train_state = train_state
        self._folder = Path(config.run.dir) / CHECKPOINTS
        self.model = start_model(
            config,
            train_state.start,
            train_state.hf_config,
            train_state.entries,
            train_state.mesh,
            "values",
        )
        self.updater = build_updater(
            self.model,
            replace(config.optimizer, lr=settings.critic_lr, min_lr=0.0),
            num_steps=settings.steps,
            updates_per_step=settings.updates_per_step,
        )
        self._skips = SkipCounter()

    def resume(self) -> None:
        """Where the session resumed."""
        if self._train_state.step:
            checkpointing.load(self._folder, step=self._train_state.step, **self._parts)

    def features(self, of_policy: VisionFeatures, images: Any) -> VisionFeatures:
        """A frozen tower is the policy's: its features are too."""
        if not of_policy.learns:
            return of_policy
        return VisionFeatures(self.updater.chunks, images)

    def add_values(self, packs: Sequence[Pack], features: VisionFeatures) -> None:
        scores = compute_logprobs(self.updater.chunks, packs, features, Scoring())
        if self._train_state.mesh.is_last_stage:
            for pack, pack_scores in zip(packs, scores, strict=True):
                assert pack.columns is not None
                pack.columns = replace(pack.columns, values=pack_scores.values)

    def update(
        self, packs: Sequence[Pack], features: VisionFeatures, loss_function: LossFunction
    ) -> dict[str, float]:
        train_state = self._train_state
        return update(
            self.updater,
            packs,
            features,
            Scoring(),
            loss_function,
            train_state.mesh,
            self._skips,
            train_state.step,
        )

    def begin_save(self, copy: bool) -> Saving:
        """Of the session's step. It is complete before the policy's checkpoint of the same step
        appears, which is the one that a run resumes from.
        """
        step = self._train_state.step
        self._prune()
        extra = {"step": step}
        return checkpointing.begin(self._folder, step, extra=extra, copy=copy, **self._parts)

    def _prune(self) -> None:
        """Steps that the policy does not have any more cannot be resumed from."""
        if self._train_state.mesh.is_driver and self._folder.exists():
            kept = complete_steps(self._train_state.folder)
            for step in set(complete_steps(self._folder)) - set(kept):
                atomic.remove_folder(step_folder(self._folder, step))

    @property
    def _parts(self) -> dict[str, Any]:
        return {
            "chunks": self.model,
            "optimizer": self.updater.optimizer,
            "scheduler": self.updater.scheduler,
        }
