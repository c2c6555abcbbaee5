"""Policy optimization on rollouts. `train_step` shows one step from top to bottom."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megavlm.algorithms.kl import adapted
from megavlm.config.algorithm import GRPO, PPO
from megavlm.data.packs.packing import Pack
from megavlm.inference.protocol import SamplingParams
from megavlm.models.common.logprobs import Scoring
from megavlm.parallel.collectives import broadcast_object, summing
from megavlm.rollout.buffer import StreamBatch
from megavlm.rollout.groups import policy_trees, rollout_metrics, sample_records
from megavlm.rollout.source import GroupSource, make_source
from megavlm.rollout.trajectory import Group
from megavlm.training.advantages import add_kl_advantages, whiten_advantages, with_advantages
from megavlm.training.base_trainer import BaseTrainer
from megavlm.training.driver import Driver
from megavlm.training.forward_backward import LossFunction, Measures, compute_logprobs
from megavlm.training.losses import Update, policy_loss, with_draft_loss
from megavlm.training.metrics import policy_metrics
from megavlm.training.reference import reference
from megavlm.training.step.rank_batch import RankBatch
from megavlm.training.step.step_plan import StepPlan
from megavlm.training.step.vision_features import VisionFeatures
from megavlm.training.streaming import (
    ArrivedBatches,
    StepGroups,
    needs_whole_step,
    stream_batch_tokens,
    streaming_mode,
)
from megavlm.training.train_state import TrainState
from megavlm.weight_sync.sync import WeightSync


class PolicyTrainer(BaseTrainer):
    is_reference: bool  # the policy was the reference before this step's updates

    def __init__(
        self, train_state: TrainState, driver: Driver | None, sync: WeightSync | None
    ) -> None:
        super().__init__(train_state, driver, sync)
        assert isinstance(train_state.config.algorithm, GRPO | PPO)
        self.settings = train_state.config.algorithm
        self.needs_whole_step = needs_whole_step(self.settings)
        self.stream_batch_tokens: int | None = None  # the step is one batch
        if streaming_mode(train_state.config) != "nothing":
            self.stream_batch_tokens = stream_batch_tokens(
                train_state.config, train_state.mesh.data_size
            )
        self.source: GroupSource | None = None  # on the driver
        if driver is not None:
            self.source = make_source(
                driver.sampler, driver.connection, driver.curriculum, train_state.phases
            )
            driver.experience = self.source

    def setup(self) -> None:
        train_state, driver = self.train_state, self.driver
        # The reference is the weights that a run starts from, not those that it resumes from.
        self.reference = reference(train_state.model) if self.settings.has_reference else None
        super().setup()
        self.state = train_state.algorithm_state
        start_kl(self.settings, self.state)
        how = None if driver is None else driver.sampler.sampling_params
        self.sampling_params: SamplingParams = broadcast_object(how, train_state.mesh)
        # Log-probs of the distribution that the servers sample from.
        self.scoring = Scoring(
            self.sampling_params.temperature, self.sampling_params.suppressed_ids
        )
        self.over_context = summing(train_state.mesh.groups.cp)

    def train_step(self) -> None:
        state, phases = self.train_state, self.train_state.phases
        stream, groups, arrived = self.stream(), StepGroups(self.settings), ArrivedBatches()
        while not arrived.is_complete:  # one batch, or several with rollout.streaming
            # the source times the phases data, reward and rollout itself
            streamed = self.weights.run_on_driver(stream.__next__)
            with phases("plan"):
                batch = self.share(None if streamed is None else self.plan(groups, streamed))
            with phases("vision"):
                features = self.encode(batch)
            with phases("reference"):
                self.add_reference_logprobs(batch, features)
            with phases("old_logprobs"):
                self.add_old_logprobs(batch, features)
            with phases("advantages"):
                self.add_advantages(batch, features)
            arrived.add(batch, features)
            if not self.needs_whole_step:
                with phases("update"):
                    self.begin_update(arrived, batch, features)
        self.record_rollouts(groups)
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
        if self.driver is not None:
            metrics = rollout_metrics(groups.sampled, state.step - 1) | metrics
            samples = sample_records(groups.trained, self.driver.sampler.processor.pieces)
            metrics |= (
                {}
                if self.stream_batch_tokens is None
                else {"waves": float(groups.num_stream_batches)}
            )
            self.record(metrics, num_tokens=batch.num_tokens, samples=samples)

    def stream(self) -> Iterator[StreamBatch[Group]]:
        """Return the streamed batches of the next step. Only the driver has them."""
        if self.source is None:
            return iter(())
        return self.source.stream(
            self.train_state.step, self.weights.refit, self.stream_batch_tokens
        )

    def plan(self, groups: StepGroups, streamed: StreamBatch[Group]) -> StepPlan:
        """Return the plan of a streamed batch of the step. Driver only."""
        config, driver = self.train_state.config, self.driver
        assert driver is not None
        minibatches = [
            policy_trees(
                minibatch,
                self.settings,
                max_new_tokens=self.sampling_params.max_new_tokens,
                max_turns=config.environment.max_turns,
                version=self.train_state.step,
                denominator=groups.denominator,
                distillation=config.distillation,
            )
            for minibatch in groups.add(streamed)
        ]
        if isinstance(self.settings, GRPO):
            minibatches = with_advantages(minibatches, self.settings)
        return driver.planner.plan(
            minibatches,
            [prompt for group in streamed.groups for prompt in group.prompts],
            [group.prompt for group in streamed.groups],
            tower_trained=self.tower_trained,
            is_first=groups.num_stream_batches == 1,
            loss_scales=groups.loss_scales,
        )

    def record_rollouts(self, groups: StepGroups) -> None:
        state = self.train_state
        if self.driver is not None and state.config.run.record_rollouts:
            with state.phases("record"):
                self.driver.recorder.record_rollouts(state.step + 1, groups.sampled)

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
            computed = packs if replays else [pack.without_routed_experts() for pack in packs]
            scores = compute_logprobs(
                self.train_state.updater.chunks, computed, features, self.scoring
            )
            if self.train_state.mesh.is_last_stage:  # where losses are computed
                for pack, pack_scores in zip(packs, scores, strict=True):
                    assert pack.columns is not None
                    pack.columns = replace(pack.columns, **{name: pack_scores.logprobs})

    def add_advantages(self, batch: RankBatch, features: VisionFeatures) -> None:
        """Add the advantages that need log-probs of a streamed batch; the driver has computed all
        others. Collective.
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
            )

    def complete_advantages(self, batch: RankBatch) -> None:
        """Finish advantages that need the whole step. Collective."""
        mesh = self.train_state.mesh
        if mesh.is_last_stage and self.needs_whole_step:
            whiten_advantages(batch.packs, over_all=summing(mesh.groups.dp_cp))

    @property
    def kl_in_reward(self) -> bool:
        in_reward = self.settings.kl_in == "reward"
        return in_reward and self.reference is not None and not self.is_reference

    def begin_update(
        self, arrived: ArrivedBatches, batch: RankBatch, features: VisionFeatures
    ) -> None:
        """Accumulate the gradients of a streamed batch for the step's first update. Collective."""
        updater = self.train_state.updater
        if arrived.num_stream_batches == 1:
            updater.zero_gradients()
        arrived.reports += updater.accumulate(
            batch.minibatches[0],
            features,
            self.loss(is_first=True),
            self.scoring,
            is_last=arrived.is_complete,
        )

    def update(
        self, batch: RankBatch, features: VisionFeatures, begun: Sequence[Measures]
    ) -> dict[str, float]:
        """Make all updates of the step. Returns metrics. begun: Measures of the first update if its
        gradients are accumulated. Collective.
        """
        updater, step = self.train_state.updater, self.train_state.step + 1
        reports: list[dict[str, float]] = []
        for packs in batch.minibatches * self.settings.epochs:
            if not reports and not self.needs_whole_step:
                assert batch.loss_scales is not None
                reports.append(updater.apply(begun, step=step, scale=batch.loss_scales[0]))
            else:
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
        loss = policy_loss(self.settings, update)
        return with_draft_loss(loss) if self.train_state.config.speculation.train else loss

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
