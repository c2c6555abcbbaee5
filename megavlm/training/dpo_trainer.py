"""Direct preference optimization on pairs of responses of the data. A pair is a tree: the prompt
once, with the chosen and the rejected response.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megavlm.config.algorithm import DPO
from megavlm.data.packs.trees import preference_tree
from megavlm.data.processor import Prompt
from megavlm.models.common.logprobs import Scoring
from megavlm.parallel.collectives import from_last_stage, summing
from megavlm.training.base_trainer import BaseTrainer
from megavlm.training.driver import Driver
from megavlm.training.forward_backward import compute_logprobs
from megavlm.training.losses import preference_loss, response_sums
from megavlm.training.metrics import preference_metrics
from megavlm.training.reference import reference
from megavlm.training.step.rank_batch import RankBatch
from megavlm.training.step.step_plan import StepPlan
from megavlm.training.step.vision_features import VisionFeatures
from megavlm.training.train_state import TrainState
from megavlm.weight_sync.sync import WeightSync


class PreferenceTrainer(BaseTrainer):
    """The driver keeps the reference's log-probs of each pair that it has seen, two numbers. A pass
    of the reference is made in steps with a pair that it has not seen: once per pair in an epoch
    over the data, then none. A resumed run starts without them.
    """

    def __init__(
        self, train_state: TrainState, driver: Driver | None, sync: WeightSync | None
    ) -> None:
        super().__init__(train_state, driver, sync)
        assert isinstance(train_state.config.algorithm, DPO)
        self.settings = train_state.config.algorithm
        self.over_context = summing(train_state.mesh.groups.cp)
        if driver is not None:
            driver.experience = self.prompts = driver.sampler.prompt_stream()
        # By the row's index: log-probs of the chosen and of the rejected response. Driver only.
        self.reference_logprobs: dict[int, Sequence[float]] = {}

    def setup(self) -> None:
        # The reference is the weights that a run starts from, not those that it resumes from.
        model = self.train_state.model
        self.reference = reference(model) if self.settings.has_reference else None
        super().setup()

    def train_step(self) -> None:
        state, phases = self.train_state, self.train_state.phases
        with phases("data"):
            prompts = None
            if self.driver is not None:
                prompts = self.prompts.take(self.settings.batch_size)
        with phases("plan"):
            batch = self.share(None if prompts is None else self.plan(prompts))
        with phases("vision"):
            features = self.encode(batch)
        with phases("reference"):
            self.add_reference_logprobs(batch, features, prompts)
        with phases("update"):
            loss = preference_loss(self.settings, self.over_context)
            report = state.updater.update(batch.packs, features, loss, step=state.step + 1)
        state.step += 1
        self.record(preference_metrics(report), num_tokens=batch.num_tokens)

    def plan(self, prompts: Sequence[Prompt]) -> StepPlan:
        """Return the plan of the step. Driver only."""
        assert self.driver is not None
        known = [self.reference_logprobs.get(prompt.row.index) for prompt in prompts]
        is_known = None not in known
        trees = [
            preference_tree(prompt, number, len(prompts), logprobs if is_known else None)
            for number, (prompt, logprobs) in enumerate(zip(prompts, known, strict=True))
        ]
        return self.driver.planner.plan([trees], prompts, prompts, tower_trained=self.tower_trained)

    def add_reference_logprobs(
        self, batch: RankBatch, features: VisionFeatures, prompts: Sequence[Prompt] | None
    ) -> None:
        """Add the reference's log-probs, unless the driver knew those of all pairs. prompts: The
        step's prompts, on the driver. Collective.
        """
        columns = batch.packs[0].columns
        assert columns is not None
        if self.reference is None or columns.reference_logprobs is not None:
            return
        state, mesh = self.train_state, self.train_state.mesh
        self.passed_tokens[state.phases.current] += batch.num_tokens
        with self.reference.in_place():
            scores = compute_logprobs(state.updater.chunks, batch.packs, features, Scoring())
        sums = None
        if mesh.is_last_stage:  # where losses are computed
            num, parts = self.settings.batch_size, []
            for pack, pack_scores in zip(batch.packs, scores, strict=True):
                assert pack.columns is not None
                pack.columns = replace(pack.columns, reference_logprobs=pack_scores.logprobs)
                parts.append(response_sums(pack.columns, pack_scores.logprobs, num))
            sums = summing(mesh.groups.dp_cp)(torch.stack(parts).sum(0)).tolist()
        sums = from_last_stage(sums, mesh)
        for prompt, *logprobs in zip(prompts or (), *sums, strict=prompts is not None):
            self.reference_logprobs[prompt.row.index] = logprobs
