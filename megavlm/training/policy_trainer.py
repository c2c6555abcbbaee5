"""Policy optimization on rollouts. `train_step` shows one step from top to bottom."""

import math
from collections.abc import Sequence
from dataclasses import replace

from megavlm.algorithms.kl import adapted
from megavlm.config.algorithm import GRPO, PPO
from megavlm.data.packing import Pack
from megavlm.inference.protocol import Sampling
from megavlm.models.common.logprobs import Scoring
from megavlm.parallel.collectives import broadcast_object, summing
from megavlm.rollout.groups import policy_trees, rollout_metrics, sample_records
from megavlm.rollout.wave import Wave
from megavlm.training.advantages import add_kl_advantages, whiten_advantages, with_advantages
from megavlm.training.base_trainer import BaseTrainer
from megavlm.training.driver import Driver
from megavlm.training.forward_backward import LossFunction, Measures, compute_logprobs
from megavlm.training.losses import Update, policy_loss
from megavlm.training.metrics import policy_metrics
from megavlm.training.reference import reference
from megavlm.training.step.rank_batch import RankBatch
from megavlm.training.step.step_plan import StepPlan
from megavlm.training.step.vision_features import VisionFeatures
from megavlm.training.train_state import TrainState
from megavlm.training.waves import (
    ArrivedWaves,
    StepGroups,
    done_early,
    wave_tokens,
    waves_of_step,
)
from megavlm.weight_sync.sync import WeightSync


class PolicyTrainer(BaseTrainer):
    is_reference: bool  # the policy was the reference before this step's updates

    def __init__(
        self, train_state: TrainState, driver: Driver | None, sync: WeightSync | None
    ) -> None:
        super().__init__(train_state, driver, sync)
        assert isinstance(train_state.config.algorithm, GRPO | PPO)
        self.settings = train_state.config.algorithm
        self.early = done_early(train_state.config)

    def setup(self) -> None:
        train_state, driver = self.train_state, self.driver
        # The reference is the weights that a run starts from, not those that it resumes from.
        self.reference = reference(train_state.model) if self.settings.has_reference else None
        super().setup()
        self.state = train_state.algorithm_state
        start_kl(self.settings, self.state)
        how = None if driver is None else driver.sampler.sampling
        self.sampling: Sampling = broadcast_object(how, train_state.mesh)
        # Log-probs of the distribution that the servers sample from.
        self.scoring = Scoring(self.sampling.temperature, self.sampling.suppressed_ids)
        self.over_context = summing(train_state.mesh.groups.cp)

    def train_step(self) -> None:
        state, phases = self.train_state, self.train_state.phases
        groups, arrived = self.begin_step(), ArrivedWaves()
        while not arrived.is_complete:  # one wave, or several with rollout.overlap
            # the source times the phases data, reward and rollout itself
            wave = self.weights.run_on_driver(lambda: self.sample(groups))
            with phases("plan"):
                plan = None if wave is None else self.plan(groups, wave)
                batch = self.share(plan)
            with phases("vision"):
                features = self.encode(batch)
            with phases("reference"):
                self.add_reference_logprobs(batch, features)
            with phases("old_logprobs"):
                self.add_old_logprobs(batch, features)
            with phases("advantages"):
                self.add_advantages(batch, features)
            arrived.add(batch, features)
            if self.early == "gradients" and not arrived.is_single:
                with phases("update"):
                    self.accumulate(arrived, batch, features)
        batch, features = arrived.joined()
        with phases("advantages"):
            self.complete_advantages(batch)
        with phases("update"):
            metrics = self.update(batch, features, arrived.reports)
            state.updater.finish()
        state.step += 1
        if state.config.rollout.replay is None:
            with phases("sync"):
                self.weights.push()
        if groups is not None:
            metrics = rollout_metrics(groups.sampled, state.step - 1) | metrics
            assert self.driver is not None
            samples = sample_records(groups.trained, self.driver.sampler.processor.pieces)
            metrics |= {"waves": float(groups.num_waves)} if self.early != "nothing" else {}
            self.record(metrics, num_tokens=batch.num_tokens, samples=samples)

    def begin_step(self) -> StepGroups | None:
        """Return the groups of the next step on the driver, None on other ranks."""
        state, driver = self.train_state, self.driver
        if driver is None:
            return None
        tokens = None
        if self.early != "nothing":
            tokens = wave_tokens(state.config, state.mesh.data_size)
        waves = waves_of_step(
            driver.source,
            self.settings.prompts_per_step,
            state.step,
            self.weights.refit,
            least_tokens=tokens,
        )
        return StepGroups(waves, self.settings)

    def sample(self, groups: StepGroups | None) -> Wave:
        """Return the next groups of the step with their rewards. Driver only."""
        state, driver = self.train_state, self.driver
        assert driver is not None and groups is not None
        wave = groups.take()
        if wave.is_last and state.config.run.record_rollouts:
            with state.phases("record"):
                driver.recorder.record_rollouts(state.step + 1, groups.sampled)
        return wave

    def plan(self, groups: StepGroups | None, wave: Wave) -> StepPlan:
        """Return the plan of a wave of the step. Driver only."""
        config = self.train_state.config
        assert self.driver is not None and groups is not None
        minibatches = [
            policy_trees(
                minibatch,
                self.settings,
                max_new_tokens=self.sampling.max_new_tokens,
                max_turns=config.environment.max_turns,
                version=self.train_state.step,
                units=groups.units,
                has_teacher=bool(config.distillation.urls),
            )
            for minibatch in groups.minibatches(wave)
        ]
        if isinstance(self.settings, GRPO):
            is_whole = self.early == "nothing"
            minibatches = with_advantages(minibatches, self.settings, is_whole=is_whole)
        return self.driver.planner.plan(
            minibatches,
            [prompt for group in wave.groups for prompt in group.prompts],
            [group.prompt for group in wave.groups],
            tower_trained=self.tower_trained,
            is_first=groups.num_waves == 1,
            loss_scales=groups.loss_scales,
        )

    def add_reference_logprobs(self, batch: RankBatch, features: VisionFeatures) -> None:
        """Add the reference's log-probs. Nothing is computed while the policy still is the
        reference: its log-probs are then the old ones, and the KL in the reward is zero.
        Collective.
        """
        has_moved = self.train_state.updater.has_moved
        self.is_reference = self.reference is not None and not has_moved
        if self.reference is not None and has_moved:
            with self.reference.in_place():
                self.add_logprobs("reference_logprobs", batch, features, first=0, replays=False)

    def add_old_logprobs(self, batch: RankBatch, features: VisionFeatures) -> None:
        """Add the policy's log-probs before the step's updates. The first minibatch is left out,
        because its update computes them anyway, unless the KL in the reward needs them earlier.
        Collective.
        """
        if self.settings.old_logprobs == "trainer":
            first = 0 if self.kl_in_reward else 1
            self.add_logprobs("old_logprobs", batch, features, first=first)
        elif self.is_reference and self.settings.kl_in == "loss":
            self.add_logprobs("reference_logprobs", batch, features, first=1)

    def add_logprobs(
        self,
        name: str,
        batch: RankBatch,
        features: VisionFeatures,
        *,
        first: int,
        replays: bool = True,
    ) -> None:
        """Add log-probs to the packs of all minibatches from the `first` on. replays: False for the
        reference, whose log-probs are its own only if its routers choose. Collective.
        """
        packs = [pack for packs in batch.minibatches[first:] for pack in packs]
        phase = self.train_state.phases.current
        self.passed_tokens[phase] += batch.num_tokens * (1 - first / self.settings.minibatches)
        if packs:
            computed = packs if replays else [pack.without_routes() for pack in packs]
            scores = compute_logprobs(
                self.train_state.updater.chunks, computed, features, self.scoring
            )
            if self.train_state.mesh.is_last_stage:  # where losses are computed
                for pack, pack_scores in zip(packs, scores, strict=True):
                    assert pack.columns is not None
                    pack.columns = replace(pack.columns, **{name: pack_scores.logprobs})

    def add_advantages(self, batch: RankBatch, features: VisionFeatures) -> None:
        """Add the advantages that need log-probs of a wave; the driver has computed all others.
        Collective.
        """
        mesh = self.train_state.mesh
        if mesh.is_last_stage and self.kl_in_reward:
            assert isinstance(self.settings, GRPO)
            add_kl_advantages(
                batch.minibatches,
                batch.num_targets,
                self.settings,
                kl_coefficient=self.state["kl_coefficient"],
                over_all=summing(mesh.groups.dp_cp),
                is_whole=self.early == "nothing",
            )

    def complete_advantages(self, batch: RankBatch) -> None:
        """Finish advantages that need the whole step. Collective."""
        mesh = self.train_state.mesh
        if mesh.is_last_stage and self.early == "passes":
            whiten_advantages(batch.packs, over_all=summing(mesh.groups.dp_cp))

    @property
    def kl_in_reward(self) -> bool:
        in_reward = self.settings.kl_in == "reward"
        return in_reward and self.reference is not None and not self.is_reference

    def accumulate(self, arrived: ArrivedWaves, batch: RankBatch, features: VisionFeatures) -> None:
        """Accumulate the gradients of a wave for the step's first update. Collective."""
        updater = self.train_state.updater
        if arrived.reports is None:
            updater.zero_gradients()
            arrived.reports = []
        if packs := batch.minibatches[0]:
            loss = self.loss(is_first=True)
            arrived.reports += updater.accumulate(packs, features, loss, self.scoring)

    def update(
        self, batch: RankBatch, features: VisionFeatures, begun: list[Measures] | None = None
    ) -> dict[str, float]:
        """Make all updates of the step. Returns metrics. begun: Measures of the first update if its
        gradients are accumulated. Collective.
        """
        reports: list[dict[str, float]] = []
        for packs in batch.minibatches * self.settings.epochs:
            if begun is not None and not reports:
                assert batch.loss_scales is not None
                scale, step = batch.loss_scales[0], self.train_state.step + 1
                updater = self.train_state.updater
                reports.append(updater.update_accumulated(begun, scale=scale, step=step))
                continue
            loss = self.loss(is_first=not reports)
            reports.append(self.update_minibatch(packs, features, loss))
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
            is_reference=self.is_reference and self.settings.kl_in == "loss",
            reduce=self.over_context,
            distillation=self.train_state.config.distillation,
        )
        return policy_loss(self.settings, update)

    def adapt_kl(self, metrics: dict[str, float]) -> None:
        settings = self.settings
        if settings.kl_target is None or "kl_reference" not in metrics:
            return
        metrics["kl_coefficient"] = self.state["kl_coefficient"]
        measured = metrics["kl_reference"]
        if math.isfinite(measured):  # it is not after a skipped update
            self.state["kl_coefficient"] = adapted(
                self.state["kl_coefficient"],
                measured,
                target=settings.kl_target,
                horizon=settings.kl_horizon,
                samples=settings.prompts_per_step * settings.responses_per_prompt,
            )


def start_kl(settings: GRPO | PPO, state: dict[str, float]) -> None:
    """Set the KL coefficient in a trainer's state. An adapted coefficient is kept on resume unless
    the recipe's kl_coefficient has changed.
    """
    given = settings.kl_coefficient
    changed = state.get("kl_coefficient_given", given) != given  # older checkpoints lack it
    if settings.kl_target is None or changed or "kl_coefficient" not in state:
        state["kl_coefficient"] = given
    state["kl_coefficient_given"] = given
