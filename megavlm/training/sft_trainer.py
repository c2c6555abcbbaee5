"""Supervised fine-tuning: the assistant's turns in the data are the responses. They are packed as
for GRPO.
"""

from megavlm.config.algorithm import SFT
from megavlm.data.packs.trees import supervised_tree
from megavlm.training.base_trainer import BaseTrainer
from megavlm.training.driver import Driver
from megavlm.training.losses import supervised_loss, with_draft_loss
from megavlm.training.metrics import supervised_metrics
from megavlm.training.step.step_plan import StepPlan
from megavlm.training.train_state import TrainState
from megavlm.weight_sync.sync import WeightSync


class SupervisedTrainer(BaseTrainer):
    def __init__(
        self, train_state: TrainState, driver: Driver | None, sync: WeightSync | None
    ) -> None:
        super().__init__(train_state, driver, sync)
        if driver is not None:
            driver.experience = self.prompts = driver.sampler.prompt_stream()

    def train_step(self) -> None:
        state, phases = self.train_state, self.train_state.phases
        with phases("data"):
            planned = self.plan()
        with phases("plan"):
            batch = self.share(planned)
        with phases("vision"):
            features = self.encode(batch)
        with phases("update"):
            loss = supervised_loss(*batch.num_targets)
            if state.config.speculation.train:
                loss = with_draft_loss(loss, *batch.num_targets)
            report = state.updater.update(batch.packs, features, loss, step=state.step + 1)
        state.step += 1
        self.record(supervised_metrics(report), num_tokens=batch.num_tokens)

    def plan(self) -> StepPlan | None:
        if (driver := self.driver) is None:
            return None
        assert isinstance(self.train_state.config.algorithm, SFT)
        prompts = self.prompts.take(self.train_state.config.algorithm.batch_size)
        trees = [supervised_tree(prompt) for prompt in prompts]
        return driver.planner.plan([trees], prompts, prompts, tower_trained=self.tower_trained)
