"""Group-relative policy optimisation. One step is `train_step`, top to bottom; rank 0 is also the
driver.
"""

from megavlm.config.schema import GRPO
from megavlm.models.common.logprobs import Scoring
from megavlm.parallel import platform
from megavlm.parallel.collectives import broadcast_object, scatter
from megavlm.rewards.registry import get
from megavlm.rollout.messages import Sampling
from megavlm.rollout.weights.sync import WeightSync
from megavlm.training import groups as grouping
from megavlm.training.driver import Driver
from megavlm.training.evaluation import sampling
from megavlm.training.groups import Group
from megavlm.training.loop import Loop
from megavlm.training.measures import policy_metrics
from megavlm.training.passes import VisionFeatures, score
from megavlm.training.plan import Work
from megavlm.training.policy_loss import policy_loss
from megavlm.training.reference import reference
from megavlm.training.session import Session


class GRPOTrainer(Loop):
    def __init__(self, session: Session, driver: Driver | None, sync: WeightSync) -> None:
        assert isinstance(session.config.algorithm, GRPO)
        self.settings = session.config.algorithm
        self.reference = reference(session.model) if self.settings.kl_coefficient else None
        super().__init__(session, driver, sync)
        how = None if driver is None else sampling(session.config, driver.processor)
        self.sampling: Sampling = broadcast_object(how, session.mesh)
        # Log-probs of the distribution that the servers sample from.
        self.scoring = Scoring(self.sampling.temperature, self.sampling.suppressed_ids)
        self.reward = get(session.config.reward.name)

    def train_step(self) -> None:
        session, phases = self.session, self.session.phases
        groups = self.roll_out()
        with phases("plan"):
            work = scatter(self.plan(groups), session.mesh)
            work = work.part(session.mesh.context_rank, platform.device())
        with phases("vision"):
            features = VisionFeatures(session.updater.chunks, work.pictures)
        with phases("reference"):
            self.add_reference_logprobs(work, features)
        with phases("old_logprobs"):
            self.add_old_logprobs(work, features)
        with phases("update"):
            reports = [
                session.update(
                    minibatch.packs,
                    features,
                    self.scoring,
                    policy_loss(self.settings, minibatch.num_targets),
                )
                for minibatch in work.minibatches
            ]
        session.step += 1
        with phases("sync"):
            self.publish()
        if groups is not None:
            metrics = grouping.metrics(groups) | policy_metrics(reports)
            self.record(
                metrics, num_tokens=work.num_tokens_everywhere, samples=grouping.samples(groups)
            )

    def roll_out(self) -> list[Group] | None:
        """Prompts, their responses and the responses' scores; None but on the driver."""
        if (driver := self.driver) is None:
            return None
        session = self.session
        with session.phases("data"):
            prompts = driver.draw(self.settings.prompts_per_step)
        with session.phases("rollout"):
            answers = driver.client.generate(
                prompts,
                n=self.settings.responses_per_prompt,
                sampling=self.sampling,
                weight_version=session.step,
            )
        with session.phases("reward"):
            return grouping.judge(driver.processor, self.reward, prompts, answers)

    def plan(self, groups: list[Group] | None) -> list[Work] | None:
        if groups is None or self.driver is None:
            return None
        trees = grouping.policy_trees(groups, normalize_by_std=self.settings.normalize_by_std)
        size = -(-len(trees) // self.settings.minibatches)
        minibatches = [trees[start : start + size] for start in range(0, len(trees), size)]
        return self.driver.plan(minibatches, [group.prompt for group in groups])

    def add_reference_logprobs(self, work: Work, features: VisionFeatures) -> None:
        if self.reference is not None:
            with self.reference.in_place():
                self.add_logprobs("reference_logprobs", work, features, first=0)

    def add_old_logprobs(self, work: Work, features: VisionFeatures) -> None:
        """The first update is on its own rollout: there the present log-probs are the old ones."""
        self.add_logprobs("old_logprobs", work, features, first=1)

    def add_logprobs(self, name: str, work: Work, features: VisionFeatures, *, first: int) -> None:
        packs = [pack for minibatch in work.minibatches[first:] for pack in minibatch.packs]
        if packs:
            scores = score(self.session.updater.chunks, packs, features, self.scoring)
            if self.session.mesh.is_last_stage:  # where losses are computed
                for pack, pack_scores in zip(packs, scores, strict=True):
                    pack.values[name] = pack_scores.logprobs
