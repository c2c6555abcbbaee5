"""Policy optimisation on rollouts. One step is `train_step`, top to bottom; rank 0 is also the
driver.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megavlm.algorithms.kl import adapted
from megavlm.config.algorithm import GRPO, PPO
from megavlm.data.packing import Pack
from megavlm.data.processor import Prompt
from megavlm.inference.protocol import Response, Sampling
from megavlm.models.common.logprobs import Scoring
from megavlm.parallel import platform
from megavlm.parallel.collectives import broadcast_object, scatter, summing
from megavlm.rollout import groups as grouping
from megavlm.rollout.groups import Group, Sampled
from megavlm.training.advantages import add_advantages
from megavlm.training.base_trainer import BaseTrainer
from megavlm.training.batch import RankBatch
from megavlm.training.driver import Driver
from megavlm.training.evaluation import asking, sampling
from megavlm.training.forward_backward import LossFunction, VisionFeatures, compute_logprobs
from megavlm.training.losses import Update, policy_loss
from megavlm.training.metrics import policy_metrics
from megavlm.training.reference import reference
from megavlm.training.train_state import TrainState
from megavlm.weight_sync.sync import WeightSync


class PolicyTrainer(BaseTrainer):
    def __init__(self, train_state: TrainState, driver: Driver | None, sync: WeightSync) -> None:
        super().__init__(train_state, driver, sync)
        assert isinstance(train_state.config.algorithm, GRPO | PPO)
        self.settings = train_state.config.algorithm

    def setup(self) -> None:
        train_state, driver = self.train_state, self.driver
        # The reference is the weights that a run starts from, not those that it resumes from.
        self.reference = reference(train_state.model) if self.settings.kl_coefficient else None
        super().setup()
        self.state = train_state.algorithm_state
        if self.settings.kl_target is None or "kl_coefficient" not in self.state:
            self.state["kl_coefficient"] = self.settings.kl_coefficient
        how = None if driver is None else sampling(train_state.config, driver.processor)
        self.sampling: Sampling = broadcast_object(how, train_state.mesh)
        # Log-probs of the distribution that the servers sample from.
        self.scoring = Scoring(self.sampling.temperature, self.sampling.suppressed_ids)
        self.over_context = summing(train_state.mesh.groups.cp)

    def train_step(self) -> None:
        train_state, phases = self.train_state, self.train_state.phases
        sampled = self.weights.run_on_driver(self.sample)
        with phases("plan"):
            rank_batch = scatter(self.plan(sampled), train_state.mesh)
            rank_batch = rank_batch.part(train_state.mesh.context_rank, platform.device())
        with phases("vision"):
            features = VisionFeatures(train_state.updater.chunks, rank_batch.images)
        with phases("reference"):
            self.add_reference_logprobs(rank_batch, features)
        with phases("old_logprobs"):
            self.add_old_logprobs(rank_batch, features)
        with phases("advantages"):
            self.add_advantages(rank_batch, features)
        with phases("update"):
            metrics = self.update(rank_batch, features)
        train_state.step += 1
        with phases("sync"):
            self.weights.push()
        if sampled is not None:
            self.record(
                grouping.metrics(sampled.everything) | metrics,
                num_tokens=rank_batch.num_tokens_everywhere,
                samples=grouping.samples(sampled.kept),
            )

    def sample(self) -> Sampled:
        """The step's groups, on the driver."""
        wanted, rounds = self.settings.prompts_per_step, self.settings.dynamic_sampling
        return grouping.sample(self.roll_out, wanted, further_rounds=rounds)

    def roll_out(self, count: int) -> list[Group]:
        """Prompts, and the episodes that start from them, with their scores: `count` groups."""
        train_state, driver = self.train_state, self.driver
        assert driver is not None
        oversample = train_state.config.rollout.oversample
        with train_state.phases("data"):
            asked = driver.partial_rollouts.ask(count, oversample, driver.draw)

        def generate(prompts: Sequence[Prompt], n: int) -> list[list[Response]]:
            if oversample == 1:
                return self.generate(prompts, n)
            begun = [item.responses for item in asked]
            answers = self.generate(prompts, n, begun=begun, enough=count)
            return driver.partial_rollouts.split(asked, answers, count)

        with train_state.phases("reward"):
            started = driver.begin(
                [item.prompt for item in asked],
                self.settings.responses_per_prompt,
                train_state.step,
            )
        episodes = driver.episode_runner.go_on(started, generate, phase=train_state.phases)
        return [Group(of_prompt) for of_prompt in episodes if of_prompt]

    def generate(self, prompts: Sequence[Prompt], n: int, **partly: Any) -> list[list[Response]]:
        """`partly`: of RolloutClient.generate, where a rollout begins or ends with a part."""
        assert self.driver is not None
        version = self.train_state.step
        how = asking(self.train_state.config, self.sampling, version)
        return self.driver.client.generate(
            prompts, n=n, sampling=how, weight_version=version, refit=self.weights.refit, **partly
        )

    def plan(self, sampled: Sampled | None) -> list[RankBatch] | None:
        if sampled is None or self.driver is None:
            return None
        groups = sampled.kept
        size = len(groups) // self.settings.minibatches
        minibatches = [
            grouping.policy_trees(
                groups[start : start + size],
                self.settings,
                max_new_tokens=self.sampling.max_new_tokens,
                max_turns=self.train_state.config.environment.max_turns,
                version=self.train_state.step,
            )
            for start in range(0, len(groups), size)
        ]
        return self.driver.plan(
            minibatches, [prompt for group in groups for prompt in group.prompts]
        )

    def add_reference_logprobs(self, rank_batch: RankBatch, features: VisionFeatures) -> None:
        """Before the first update the policy is the reference, so that a reward holds no KL."""
        in_reward = self.settings.kl_in == "reward"
        if self.reference is not None and (self.train_state.updater.has_moved or not in_reward):
            with self.reference.in_place():
                self.add_logprobs("reference_logprobs", rank_batch, features, first=0)

    def add_old_logprobs(self, rank_batch: RankBatch, features: VisionFeatures) -> None:
        """The first update is on its own rollout: there the present log-probs are the old ones."""
        if self.settings.old_logprobs == "trainer":
            first = 0 if self.kl_in_reward else 1
            self.add_logprobs("old_logprobs", rank_batch, features, first=first)

    def add_logprobs(
        self, name: str, rank_batch: RankBatch, features: VisionFeatures, *, first: int
    ) -> None:
        packs = [pack for minibatch in rank_batch.minibatches[first:] for pack in minibatch.packs]
        if packs:
            scores = compute_logprobs(
                self.train_state.updater.chunks, packs, features, self.scoring
            )
            if self.train_state.mesh.is_last_stage:  # where losses are computed
                for pack, pack_scores in zip(packs, scores, strict=True):
                    assert pack.columns is not None
                    pack.columns = replace(pack.columns, **{name: pack_scores.logprobs})

    def add_advantages(self, rank_batch: RankBatch, features: VisionFeatures) -> None:
        mesh = self.train_state.mesh
        if mesh.is_last_stage:
            add_advantages(
                rank_batch.packs,
                self.settings,
                kl_coefficient=self.state["kl_coefficient"] if self.kl_in_reward else 0.0,
                over_context=self.over_context,
                over_all=summing(mesh.groups.dp_cp),
            )

    @property
    def kl_in_reward(self) -> bool:
        return self.settings.kl_in == "reward" and self.train_state.updater.has_moved

    def update(self, rank_batch: RankBatch, features: VisionFeatures) -> dict[str, float]:
        """All updates of the step; metrics."""
        reports: list[dict[str, float]] = []
        for minibatch in rank_batch.minibatches * self.settings.epochs:
            loss = self.loss(is_first=not reports)
            reports.append(self.update_minibatch(minibatch.packs, features, loss))
        metrics = policy_metrics(reports)
        self.adapt_kl(metrics)
        return metrics

    def update_minibatch(
        self,
        packs: Sequence[Pack],
        features: VisionFeatures,
        loss: LossFunction,
        *,
        value_head_alone: bool = False,
    ) -> dict[str, float]:
        """Update the policy; see Updater.update. Collective."""
        return self.train_state.updater.update(
            packs,
            features,
            loss,
            step=self.train_state.step + 1,
            scoring=self.scoring,
            value_head_alone=value_head_alone,
        )

    def loss(self, *, is_first: bool) -> LossFunction:
        update = Update(
            kl_coefficient=self.state["kl_coefficient"],
            is_first=is_first,
            has_moved=self.train_state.updater.has_moved,
            reduce=self.over_context,
        )
        return policy_loss(self.settings, update)

    def adapt_kl(self, metrics: dict[str, float]) -> None:
        settings = self.settings
        if settings.kl_target is not None and "kl_reference" in metrics:
            metrics["kl_coefficient"] = self.state["kl_coefficient"]
            self.state["kl_coefficient"] = adapted(
                self.state["kl_coefficient"],
                metrics["kl_reference"],
                target=settings.kl_target,
                horizon=settings.kl_horizon,
                samples=settings.prompts_per_step * settings.responses_per_prompt,
            )
