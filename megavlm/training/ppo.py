"""Proximal policy optimisation with a critic (arXiv 1707.06347): the steps of the policy's trainer,
with values before the advantages and the critic's loss in the update.
"""

from collections.abc import Callable
from typing import Any

from megavlm.checkpointing import Saving
from megavlm.config.schema import PPO
from megavlm.parallel.collectives import reduce_measures
from megavlm.rollout.weights.sync import WeightSync
from megavlm.training.critic import Critic
from megavlm.training.driver import Driver
from megavlm.training.measures import (
    critic_metrics,
    engine_metrics,
    policy_metrics,
    value_metrics,
)
from megavlm.training.offload import Part, trainer_parts
from megavlm.training.passes import VisionFeatures, score
from megavlm.training.plan import Work
from megavlm.training.policy_loss import engine_gap
from megavlm.training.session import Session
from megavlm.training.trainer import PolicyTrainer
from megavlm.training.value_update import critic_loss, with_value_loss


class PPOTrainer(PolicyTrainer):
    """The critic is a model of its own, or a value head on the policy."""

    def __init__(self, session: Session, driver: Driver | None, sync: WeightSync) -> None:
        assert isinstance(session.config.algorithm, PPO)
        self.ppo = session.config.algorithm
        self.critic = Critic(session, self.ppo) if self.ppo.critic == "separate" else None
        super().__init__(session, driver, sync)

    def resume(self) -> dict[str, Any] | None:
        state = super().resume()
        if self.critic is not None:
            self.critic.resume()
        return state

    def parts(self) -> dict[str, Part]:
        if self.critic is None:
            return super().parts()
        return super().parts() | trainer_parts(self.critic.updater, "critic_")

    @property
    def critic_alone(self) -> bool:
        """Whether the step is one of the critic's warm-up."""
        return self.session.step < self.ppo.critic_warmup_steps

    def add_advantages(self, work: Work, features: VisionFeatures) -> None:
        if self.critic is None:
            self.add_shared_values(work, features)
        else:
            self.critic.add_values(work.packs, self.critic.features(features, work.pictures))
        super().add_advantages(work, features)

    def add_shared_values(self, work: Work, features: VisionFeatures) -> None:
        """One pass gives the values and the old log-probs of every pack."""
        scores = score(self.session.updater.chunks, work.packs, features, self.scoring)
        if self.session.mesh.is_last_stage:
            for pack, pack_scores in zip(work.packs, scores, strict=True):
                pack.values["values"] = pack_scores.values
                pack.values["old_logprobs"] = pack_scores.logprobs

    def add_old_logprobs(self, work: Work, features: VisionFeatures) -> None:
        if self.critic is not None:
            super().add_old_logprobs(work, features)

    def update(self, work: Work, features: VisionFeatures) -> dict[str, float]:
        if self.critic is None:
            return self.update_shared(work, features)
        theirs = self.critic.features(features, work.pictures)
        loss = critic_loss(self.ppo)
        metrics = critic_metrics(
            [
                self.critic.update(minibatch.packs, theirs, loss)
                for minibatch in work.minibatches * self.ppo.epochs
            ]
        )
        if self.critic_alone:
            return metrics | self.engine_gap(work, features)
        return metrics | super().update(work, features)

    def engine_gap(self, work: Work, features: VisionFeatures) -> dict[str, float]:
        """Of a step that makes no pass over the policy's losses, from a pass of its own."""
        session = self.session
        self.add_logprobs("old_logprobs", work, features, first=0)
        gaps = []
        if session.mesh.is_last_stage:
            for pack in work.packs:
                values = pack.values
                gap = engine_gap(
                    values["old_logprobs"], values["rollout_logprobs"], values.get("stale")
                )
                gaps.append(gap)
        return engine_metrics([reduce_measures(gaps, session.mesh)])

    def update_shared(self, work: Work, features: VisionFeatures) -> dict[str, float]:
        reports: list[dict[str, float]] = []
        alone = self.critic_alone
        for chunk in self.session.model:
            if chunk.value_head is not None:
                chunk.value_head.learns_alone = alone
        for minibatch in work.minibatches * self.ppo.epochs:
            policy = self.loss(is_first=not reports)
            loss = with_value_loss(self.ppo, policy, critic_alone=alone)
            reports.append(
                self.session.update(
                    minibatch.packs, features, self.scoring, loss, value_head_alone=alone
                )
            )
        metrics = policy_metrics(reports) | value_metrics(reports)
        self.adapt_kl(metrics)
        return metrics

    @property
    def companion(self) -> Callable[[bool], Saving] | None:
        return None if self.critic is None else self.critic.begin_save
