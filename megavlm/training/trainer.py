"""Policy optimisation on rollouts. One step is `train_step`, top to bottom; rank 0 is also the
driver.
"""

from collections.abc import Sequence
from typing import Any

from megavlm.algorithms.kl import adapted
from megavlm.config.schema import GRPO, PPO
from megavlm.data.processor import Prompt
from megavlm.models.common.logprobs import Scoring
from megavlm.parallel import platform
from megavlm.parallel.collectives import broadcast_object, scatter, summing
from megavlm.rollout.messages import Response, Sampling
from megavlm.rollout.weights.sync import WeightSync
from megavlm.training import groups as grouping
from megavlm.training.advantages import add_advantages
from megavlm.training.driver import Driver
from megavlm.training.evaluation import asking, sampling
from megavlm.training.groups import Group, Sampled
from megavlm.training.loop import Loop
from megavlm.training.measures import policy_metrics
from megavlm.training.passes import LossFunction, VisionFeatures, score
from megavlm.training.plan import Work
from megavlm.training.policy_loss import Update, policy_loss
from megavlm.training.reference import reference
from megavlm.training.session import Session


class PolicyTrainer(Loop):
    def __init__(self, session: Session, driver: Driver | None, sync: WeightSync) -> None:
        assert isinstance(session.config.algorithm, GRPO | PPO)
        self.settings = session.config.algorithm
        self.reference = reference(session.model) if self.settings.kl_coefficient else None
        super().__init__(session, driver, sync)
        self.state = session.algorithm_state
        if self.settings.kl_target is None or "kl_coefficient" not in self.state:
            self.state["kl_coefficient"] = self.settings.kl_coefficient
        how = None if driver is None else sampling(session.config, driver.processor)
        self.sampling: Sampling = broadcast_object(how, session.mesh)
        # Log-probs of the distribution that the servers sample from.
        self.scoring = Scoring(self.sampling.temperature, self.sampling.suppressed_ids)
        self.over_context = summing(session.mesh.groups.cp)

    def train_step(self) -> None:
        session, phases = self.session, self.session.phases
        sampled = self.stand_by(self.sample)
        with phases("plan"):
            work = scatter(self.plan(sampled), session.mesh)
            work = work.part(session.mesh.context_rank, platform.device())
        with phases("vision"):
            features = VisionFeatures(session.updater.chunks, work.pictures)
        with phases("reference"):
            self.add_reference_logprobs(work, features)
        with phases("old_logprobs"):
            self.add_old_logprobs(work, features)
        with phases("advantages"):
            self.add_advantages(work, features)
        with phases("update"):
            metrics = self.update(work, features)
        session.step += 1
        with phases("sync"):
            self.publish()
        if sampled is not None:
            self.record(
                grouping.metrics(sampled.everything) | metrics,
                num_tokens=work.num_tokens_everywhere,
                samples=grouping.samples(sampled.kept),
            )

    def sample(self) -> Sampled:
        """The step's groups, on the driver."""
        wanted, rounds = self.settings.prompts_per_step, self.settings.dynamic_sampling
        return grouping.sample(self.roll_out, wanted, further_rounds=rounds)

    def roll_out(self, count: int) -> list[Group]:
        """Prompts, and the episodes that start from them, with their scores: `count` groups."""
        session, driver = self.session, self.driver
        assert driver is not None
        oversample = session.config.rollout.oversample
        with session.phases("data"):
            asked = driver.backlog.ask(count, oversample, driver.draw)

        def generate(prompts: Sequence[Prompt], n: int) -> list[list[Response]]:
            if oversample == 1:
                return self.generate(prompts, n)
            begun = [item.responses for item in asked]
            answers = self.generate(prompts, n, begun=begun, enough=count)
            return driver.backlog.split(asked, answers, count)

        with session.phases("reward"):
            started = driver.begin(
                [item.prompt for item in asked], self.settings.responses_per_prompt, session.step
            )
        episodes = driver.arena.go_on(started, generate, phase=session.phases)
        return [Group(of_prompt) for of_prompt in episodes if of_prompt]

    def generate(self, prompts: Sequence[Prompt], n: int, **partly: Any) -> list[list[Response]]:
        """`partly`: of RolloutClient.generate, where a rollout begins or ends with a part."""
        assert self.driver is not None
        version = self.session.step
        how = asking(self.session.config, self.sampling, version)
        return self.driver.client.generate(
            prompts, n=n, sampling=how, weight_version=version, refit=self.refit, **partly
        )

    def plan(self, sampled: Sampled | None) -> list[Work] | None:
        if sampled is None or self.driver is None:
            return None
        groups = sampled.kept
        size = len(groups) // self.settings.minibatches
        minibatches = [
            grouping.policy_trees(
                groups[start : start + size],
                self.settings,
                max_new_tokens=self.sampling.max_new_tokens,
                max_turns=self.session.config.environment.max_turns,
                version=self.session.step,
            )
            for start in range(0, len(groups), size)
        ]
        return self.driver.plan(
            minibatches, [prompt for group in groups for prompt in group.prompts]
        )

    def add_reference_logprobs(self, work: Work, features: VisionFeatures) -> None:
        """Before the first update the policy is the reference, so that a reward holds no KL."""
        in_reward = self.settings.kl_in == "reward"
        if self.reference is not None and (self.session.updater.has_moved or not in_reward):
            with self.reference.in_place():
                self.add_logprobs("reference_logprobs", work, features, first=0)

    def add_old_logprobs(self, work: Work, features: VisionFeatures) -> None:
        """The first update is on its own rollout: there the present log-probs are the old ones."""
        if self.settings.old_logprobs == "trainer":
            first = 0 if self.kl_in_reward else 1
            self.add_logprobs("old_logprobs", work, features, first=first)

    def add_logprobs(self, name: str, work: Work, features: VisionFeatures, *, first: int) -> None:
        packs = [pack for minibatch in work.minibatches[first:] for pack in minibatch.packs]
        if packs:
            scores = score(self.session.updater.chunks, packs, features, self.scoring)
            if self.session.mesh.is_last_stage:  # where losses are computed
                for pack, pack_scores in zip(packs, scores, strict=True):
                    pack.values[name] = pack_scores.logprobs

    def add_advantages(self, work: Work, features: VisionFeatures) -> None:
        mesh = self.session.mesh
        if mesh.is_last_stage:
            add_advantages(
                work.packs,
                self.settings,
                kl_coefficient=self.state["kl_coefficient"] if self.kl_in_reward else 0.0,
                over_context=self.over_context,
                over_all=summing(mesh.groups.dp_cp),
            )

    @property
    def kl_in_reward(self) -> bool:
        return self.settings.kl_in == "reward" and self.session.updater.has_moved

    def update(self, work: Work, features: VisionFeatures) -> dict[str, float]:
        """All updates of the step; metrics."""
        reports: list[dict[str, float]] = []
        for minibatch in work.minibatches * self.settings.epochs:
            loss = self.loss(is_first=not reports)
            reports.append(self.session.update(minibatch.packs, features, self.scoring, loss))
        metrics = policy_metrics(reports)
        self.adapt_kl(metrics)
        return metrics

    def loss(self, *, is_first: bool) -> LossFunction:
        update = Update(
            kl_coefficient=self.state["kl_coefficient"],
            is_first=is_first,
            has_moved=self.session.updater.has_moved,
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
