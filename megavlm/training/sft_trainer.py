"""Supervised fine-tuning: the answers of the rows are the responses, on the same data and packs as
GRPO.
"""

from megavlm.config.algorithm import SFT
from megavlm.data.packing import prompt_tree
from megavlm.parallel import platform
from megavlm.parallel.collectives import scatter
from megavlm.training.base_trainer import BaseTrainer
from megavlm.training.batch import RankBatch
from megavlm.training.forward_backward import VisionFeatures
from megavlm.training.losses import supervised_loss
from megavlm.training.metrics import supervised_metrics


class SupervisedTrainer(BaseTrainer):
    def train_step(self) -> None:
        train_state, phases = self.train_state, self.train_state.phases
        with phases("data"):
            planned = self.plan()
        with phases("plan"):
            rank_batch = scatter(planned, train_state.mesh)
            rank_batch = rank_batch.part(train_state.mesh.context_rank, platform.device())
        with phases("vision"):
            features = VisionFeatures(train_state.updater.chunks, rank_batch.images)
        (batch,) = rank_batch.minibatches
        with phases("update"):
            report = train_state.updater.update(
                batch.packs,
                features,
                supervised_loss(batch.num_targets),
                step=train_state.step + 1,
            )
        train_state.step += 1
        self.record(supervised_metrics(report), num_tokens=rank_batch.num_tokens_everywhere)

    def plan(self) -> list[RankBatch] | None:
        if (driver := self.driver) is None:
            return None
        assert isinstance(self.train_state.config.algorithm, SFT)
        prompts = driver.draw(self.train_state.config.algorithm.batch_size)
        answers = [driver.processor.encode_answer(prompt.row.answer) for prompt in prompts]
        trees = [
            prompt_tree(prompt, [answer]) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return driver.plan([trees], prompts)
