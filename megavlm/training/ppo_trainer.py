"""Proximal policy optimisation with a critic (arXiv 1707.06347): the steps of PolicyTrainer, with
values computed before the advantages and the critic's loss in the update.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megavlm.checkpointing.save import PendingSave
from megavlm.config.algorithm import PPO
from megavlm.parallel.collectives import reduce_measures, summing
from megavlm.parallel.offload import Offloadable
from megavlm.training.advantages import add_value_advantages, whiten_advantages
from megavlm.training.colocate import trainer_memory
from megavlm.training.critic import Critic
from megavlm.training.driver import Driver
from megavlm.training.forward_backward import Measures, compute_logprobs
from megavlm.training.losses import critic_loss, engine_gap, with_value_loss
from megavlm.training.metrics import (
    critic_metrics,
    engine_metrics,
    policy_metrics,
    value_metrics,
)
from megavlm.training.policy_trainer import PolicyTrainer
from megavlm.training.step.rank_batch import RankBatch
from megavlm.training.step.vision_features import VisionFeatures
from megavlm.training.train_state import TrainState
from megavlm.weight_sync.sync import WeightSync


class PPOTrainer(PolicyTrainer):
    """The critic is a model of its own, or a value head on the policy."""

    def __init__(
        self, train_state: TrainState, driver: Driver | None, sync: WeightSync | None
    ) -> None:
        super().__init__(train_state, driver, sync)
        assert isinstance(train_state.config.algorithm, PPO)
        self.ppo = train_state.config.algorithm

    def setup(self) -> None:
        self.critic = Critic(self.train_state, self.ppo) if self.ppo.critic == "separate" else None
        super().setup()

    def resume(self) -> Mapping[str, Any] | None:
        state = super().resume()
        if self.critic is not None:
            self.critic.resume()
        return state

    def offloadable(self) -> dict[str, Offloadable]:
        if self.critic is None:
            return super().offloadable()
        return super().offloadable() | trainer_memory(self.critic.updater, "critic_")

    @property
    def critic_alone(self) -> bool:
        """True during the critic's warm-up, when the policy is not updated."""
        return self.train_state.step < self.ppo.critic_warmup_steps

    def add_advantages(self, batch: RankBatch, features: VisionFeatures) -> None:
        if self.critic is None:
            self.add_shared_values(batch, features)
        else:
            self.critic.add_values(batch.packs, self.critic.features(features, batch.images))

    def complete_advantages(self, batch: RankBatch) -> None:
        mesh = self.train_state.mesh
        if mesh.is_last_stage:
            add_value_advantages(
                batch.packs,
                self.ppo,
                kl_coefficient=self.state["kl_coefficient"] if self.kl_in_reward else 0.0,
                over_context=self.over_context,
            )
            whiten_advantages(batch.packs, over_all=summing(mesh.groups.dp_cp))

    def add_shared_values(self, batch: RankBatch, features: VisionFeatures) -> None:
        """Add values and old log-probs to every pack, from a single pass. Collective."""
        self.passed_tokens["advantages"] += batch.num_tokens
        scores = compute_logprobs(
            self.train_state.updater.chunks, batch.packs, features, self.scoring
        )
        if self.train_state.mesh.is_last_stage:
            for pack, pack_scores in zip(batch.packs, scores, strict=True):
                assert pack.columns is not None
                pack.columns = replace(
                    pack.columns, values=pack_scores.values, old_logprobs=pack_scores.logprobs
                )

    def add_old_logprobs(self, batch: RankBatch, features: VisionFeatures) -> None:
        if self.critic is not None:
            super().add_old_logprobs(batch, features)

    def update(
        self, batch: RankBatch, features: VisionFeatures, begun: Sequence[Measures]
    ) -> dict[str, float]:
        if self.critic is None:
            return self.update_shared(batch, features)
        theirs = self.critic.features(features, batch.images)
        loss = critic_loss(self.ppo)
        metrics = critic_metrics(
            [
                self.critic.updater.update(
                    [pack.without_routed_experts() for pack in packs],
                    theirs,
                    loss,
                    step=self.train_state.step + 1,
                )
                for packs in batch.minibatches * self.ppo.epochs
            ]
        )
        self.critic.updater.finish()
        if self.critic_alone:
            return metrics | self.engine_gap(batch, features)
        return metrics | super().update(batch, features, begun)

    def engine_gap(self, batch: RankBatch, features: VisionFeatures) -> dict[str, float]:
        """Return the engine metrics of a warm-up step. It computes no policy loss, so they take a
        pass of their own. Collective.
        """
        train_state = self.train_state
        self.add_logprobs("old_logprobs", batch, features, first=0)
        gaps = []
        if train_state.mesh.is_last_stage:
            for pack in batch.packs:
                columns = pack.columns
                assert columns is not None and columns.old_logprobs is not None
                gaps.append(engine_gap(columns.old_logprobs, columns))
        return engine_metrics([reduce_measures(gaps, train_state.mesh)])

    def update_shared(self, batch: RankBatch, features: VisionFeatures) -> dict[str, float]:
        reports: list[dict[str, float]] = []
        alone = self.critic_alone
        for chunk in self.train_state.model:
            if chunk.value_head is not None:
                chunk.value_head.learns_alone = alone
        for packs in batch.minibatches * self.ppo.epochs:
            policy = self.loss(is_first=not reports)
            loss = with_value_loss(self.ppo, policy, critic_alone=alone)
            reports.append(self.update_minibatch(packs, features, loss, value_head_alone=alone))
        metrics = policy_metrics(reports) | value_metrics(reports)
        self.adapt_kl(metrics)
        return metrics

    @property
    def companion(self) -> Callable[[bool], PendingSave] | None:
        return None if self.critic is None else self.critic.begin_save
