"""Supervised fine-tuning: the answers of the rows are the responses, on the same data and packs as
GRPO.
"""

from megavlm.config.schema import SFT
from megavlm.data.packing import prompt_tree
from megavlm.models.common.logprobs import Scoring
from megavlm.parallel import platform
from megavlm.parallel.collectives import scatter
from megavlm.training.loop import Loop
from megavlm.training.measures import supervised_metrics
from megavlm.training.passes import VisionFeatures
from megavlm.training.plan import Work
from megavlm.training.policy_loss import supervised_loss


class SupervisedTrainer(Loop):
    def train_step(self) -> None:
        session, phases = self.session, self.session.phases
        with phases("data"):
            planned = self.plan()
        with phases("plan"):
            work = scatter(planned, session.mesh)
            work = work.part(session.mesh.context_rank, platform.device())
        with phases("vision"):
            features = VisionFeatures(session.updater.chunks, work.pictures)
        (batch,) = work.minibatches
        with phases("update"):
            report = session.update(
                batch.packs, features, Scoring(), supervised_loss(batch.num_targets)
            )
        session.step += 1
        self.record(supervised_metrics(report), num_tokens=work.num_tokens_everywhere)

    def plan(self) -> list[Work] | None:
        if (driver := self.driver) is None:
            return None
        assert isinstance(self.session.config.algorithm, SFT)
        prompts = driver.draw(self.session.config.algorithm.batch_size)
        answers = [driver.processor.encode_answer(prompt.row.answer) for prompt in prompts]
        trees = [
            prompt_tree(prompt, [answer]) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return driver.plan([trees], prompts)
