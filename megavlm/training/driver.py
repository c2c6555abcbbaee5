"""The driver, rank 0's part of a run: the plan of each step, evaluation and records."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megavlm.config.schema import Config
from megavlm.environments.curriculum import Curriculum
from megavlm.inference.connect import Connection
from megavlm.inference.teacher import check_tokenizers
from megavlm.observability.progress import Progress
from megavlm.parallel.mesh import Mesh
from megavlm.rollout.evaluator import Evaluator
from megavlm.rollout.sampler import Sampler
from megavlm.rollout.source import Experience
from megavlm.training.recorder import Recorder
from megavlm.training.step.planner import StepPlanner


class Driver:
    experience: Experience  # set by the trainer
    recorder: Recorder  # after start

    def __init__(
        self,
        config: Config,
        hf_config: Any,
        mesh: Mesh,
        connection: Connection | None,
        progress: Progress,
    ) -> None:
        """Load the data and start the rewards. connection: The rollout servers; None in a run that
        generates nothing.
        """
        self.config, self.connection, self._progress = config, connection, progress
        self.sampler = Sampler(config, None if connection is None else connection.client)
        if config.distillation.teachers and config.rollout.replay is None:
            check_tokenizers(config.distillation, self.sampler.processor.token_texts())
        self.planner = StepPlanner(config, hf_config, mesh, self.sampler.processor)
        self.evaluator = Evaluator(self.sampler, config.evaluation)
        self.curriculum = Curriculum(config.curriculum)

    def start(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Open the records at `step`, and restore `state`, the `state_dict` of a checkpoint."""
        if state is not None:
            self.curriculum.load_state_dict(state["curriculum"])
            files = {key: x.read_bytes() for key, x in state.items() if isinstance(x, Path)}
            self.experience.load_state_dict({**state, **files})
        self.recorder = Recorder(self.config, self._progress, step)

    def state_dict(self) -> dict[str, Any]:
        return {**self.experience.state_dict(), "curriculum": self.curriculum.state_dict()}

    def record(
        self, step: int, metrics: dict[str, float], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        """Record a finished step, and move the curriculum on."""
        metrics |= self.experience.measures
        if "reward" in metrics:
            metrics |= self.curriculum.record(metrics["reward"])
        self.recorder.record_step(step, metrics, samples, self.planner.rows)

    def evaluate(self, step: int, refit: Callable[[], None]) -> None:
        """Evaluate the weights of `step` on the test rows. `refit` pushes them to servers that
        restarted.
        """
        self.recorder.record_evaluation(step, self.evaluator.run(step, refit))

    def close(self) -> None:
        self.experience.close()
        self.sampler.close()
        self.recorder.close()
