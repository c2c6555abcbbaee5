"""A separate critic: a second model, with a value head in place of the output layer. It starts from
the policy's weights, and is trained and checkpointed separately.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megavlm.checkpointing import atomic
from megavlm.checkpointing.folder import complete_steps, step_folder
from megavlm.checkpointing.load import load_checkpoint
from megavlm.checkpointing.save import PendingSave, SaveTarget, begin_save
from megavlm.config.algorithm import PPO
from megavlm.data.packs.packing import Pack
from megavlm.models.common.logprobs import Scoring
from megavlm.training.forward_backward import compute_logprobs
from megavlm.training.initial_model import start_model
from megavlm.training.optimizer import build_updater
from megavlm.training.step.rank_images import RankImages
from megavlm.training.step.vision_features import VisionFeatures
from megavlm.training.train_state import TrainState, beat_with_passes

CRITIC_CHECKPOINTS = "critic_checkpoints"  # folder in the run directory


class Critic:
    def __init__(self, train_state: TrainState, settings: PPO) -> None:
        """Build this rank's part of the critic with its initial weights. Collective."""
        config = train_state.config
        self._train_state = train_state
        self._folder = Path(config.run.dir) / CRITIC_CHECKPOINTS
        self.model = start_model(
            config,
            train_state.initial_step,
            train_state.hf_config,
            train_state.entries,
            train_state.mesh,
            "values",
        )
        beat_with_passes(self.model, train_state.phases)
        self.updater = build_updater(
            self.model,
            replace(
                config.optimizer,
                lr=settings.critic_lr,
                min_lr=0.0,
                tower_lr=None,
                merger_lr=None,
            ),
            train_state.mesh,
            num_steps=settings.steps,
            updates_per_step=settings.updates_per_step,
        )

    def resume(self) -> None:
        """Load the critic checkpoint of the step that the policy resumed from. Collective."""
        if self._train_state.step:
            with self.updater.state_on_device():
                load_checkpoint(
                    self._folder,
                    step=self._train_state.step,
                    chunks=self.model,
                    optimizer=self.updater.optimizer,
                    scheduler=self.updater.scheduler,
                )

    def features(self, of_policy: VisionFeatures, images: RankImages) -> VisionFeatures:
        """Return the critic's image features. With a frozen tower they are the policy's."""
        if not of_policy.tower_trained:
            return of_policy
        return VisionFeatures(self.updater.chunks, images)

    def add_values(self, packs: Sequence[Pack], features: VisionFeatures) -> None:
        """Add the values of all targets to `packs`, on the last pipeline stage. Collective."""
        computed = [pack.without_routed_experts() for pack in packs]
        scores = compute_logprobs(self.updater.chunks, computed, features, Scoring())
        if self._train_state.mesh.is_last_stage:
            for pack, pack_scores in zip(packs, scores, strict=True):
                assert pack.columns is not None
                pack.columns = replace(pack.columns, values=pack_scores.values)

    def begin_save(self, copy: bool) -> PendingSave:
        """Begin to save the critic at the current step. Collective.

        The critic's checkpoint is complete before the policy's checkpoint of the same step appears.
        A run resumes from the latter, so it always finds the former.
        """
        step = self._train_state.step
        self._prune()
        target = SaveTarget(self._folder)
        with self.updater.state_on_device():
            return begin_save(target, step, self.updater, extra={"step": step}, copy=copy)

    def _prune(self) -> None:
        """Remove steps that the policy no longer has: no run can resume from them."""
        if self._train_state.mesh.is_driver and self._folder.exists():
            kept = complete_steps(self._train_state.folder)
            for step in set(complete_steps(self._folder)) - set(kept):
                atomic.remove_folder(step_folder(self._folder, step))
