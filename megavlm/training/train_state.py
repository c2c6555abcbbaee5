"""State of a training run on one rank: mesh, model, updater, and the number of finished steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from megavlm.checkpointing.all_ranks import run_on_all_ranks
from megavlm.checkpointing.folder import POLICY_CHECKPOINTS, Manifest
from megavlm.checkpointing.load import load_checkpoint
from megavlm.checkpointing.retention import Retention
from megavlm.checkpointing.save import PendingSave, SaveTarget
from megavlm.checkpointing.saver import Saver
from megavlm.config.algorithm import PPO
from megavlm.config.schema import Config
from megavlm.families import family
from megavlm.model_config import model_config
from megavlm.models.common.mapping import Entry
from megavlm.models.common.model import VisionLanguageModel
from megavlm.observability.phases import Phases, seconds_outside_phases
from megavlm.observability.progress import Progress
from megavlm.parallel.mesh import Mesh
from megavlm.training.initial_model import (
    adapter_settings,
    start_model,
    starting_step,
)
from megavlm.training.optimizer import Updater, build_updater
from megavlm.training.resume import (
    check_resume,
    checkpoint_identity,
    model_identity,
    step_to_resume,
)


@dataclass(kw_only=True, eq=False)
class TrainState:
    """The state of a training run on one rank.

    step: Number of finished training steps.

    initial_step: Checkpoint step that the weights start from; None for an HF folder.

    start: The identity of that step. It may be deleted while the run goes on.

    base: The identity of the HF folder that the weights start from; None for a checkpoint step, and
    on ranks other than the driver.

    algorithm_state: The trainer's own values in a checkpoint, equal on all ranks.

    evaluated_step: Last step whose weights were evaluated; only the driver's value counts.
    """

    config: Config
    mesh: Mesh
    hf_config: Any
    entries: Sequence[Entry]
    initial_step: Path | None
    start: dict[str, str] | None
    base: dict[str, str] | None
    model: list[VisionLanguageModel]
    updater: Updater
    saver: Saver
    progress: Progress
    phases: Phases
    step: int = 0
    evaluated_step: int | None = None
    algorithm_state: dict[str, float] = field(default_factory=dict)
    seconds_between_steps: dict[str, float] = field(default_factory=dict)

    @classmethod
    def build(cls, config: Config, mesh: Mesh, progress: Progress, phases: Phases) -> Self:
        """Build this rank's part of the model with its initial weights. Collective."""
        hf_config = model_config(config.model.folder)
        parts, trains_head = family(hf_config.model_type), config.speculation.train
        entries = parts.mapping(hf_config, draft_head=trains_head)
        algorithm = config.algorithm
        has_shared_critic = isinstance(algorithm, PPO) and algorithm.critic == "shared"
        head: Literal["tokens", "both"] = "both" if has_shared_critic else "tokens"
        initial_step = starting_step(config)
        model = start_model(config, initial_step, hf_config, entries, mesh, head)
        updater = build_updater(
            model,
            config.optimizer,
            mesh,
            num_steps=algorithm.policy_steps,
            updates_per_step=algorithm.updates_per_step,
            value_head_lr=algorithm.critic_lr if isinstance(algorithm, PPO) else None,
            speculation=config.speculation if trains_head else None,
        )
        kept = config.checkpoint
        target = SaveTarget(
            Path(config.run.dir) / POLICY_CHECKPOINTS,
            hf_folder=Path(config.model.folder),
            adapters=adapter_settings(config, initial_step),
            retention=Retention(
                last=kept.keep_last,
                every=kept.keep_every,
                metric=kept.best_metric,
                higher_is_better=kept.best_mode == "max",
            ),
        )
        saver = Saver(target, background=kept.async_save)
        beat_with_passes(model, phases)
        return cls(
            config=config,
            mesh=mesh,
            hf_config=hf_config,
            entries=entries,
            initial_step=initial_step,
            start=checkpoint_identity(initial_step),
            base=model_identity(Path(config.model.folder))
            if mesh.is_driver and initial_step is None
            else None,
            model=model,
            updater=updater,
            saver=saver,
            progress=progress,
            phases=phases,
        )

    @property
    def folder(self) -> Path:
        """The policy's checkpoint folder."""
        return Path(self.config.run.dir) / POLICY_CHECKPOINTS

    def resume(self) -> dict[str, Any] | None:
        """Load the checkpoint step that the configuration names, or the run's latest one. Returns
        the driver's state in it, or None if there is no checkpoint. Collective.

        Raises ValueError if the configuration cannot continue from the step.
        """

        def find() -> int | None:
            """Find and check the step on one rank, so that warnings appear once."""
            if not self.mesh.is_driver or (path := step_to_resume(self.config)) is None:
                return None
            check_resume(self.config, path, self.hf_config.model_type, self.initial_step)
            return Manifest.read(path).step

        found = run_on_all_ranks("resume", find)
        step = next((step for step in found if step is not None), None)
        if step is None:
            return None
        with self.updater.state_on_device():
            extra = load_checkpoint(
                self.folder,
                step=step,
                chunks=self.model,
                optimizer=self.updater.optimizer,
                scheduler=self.updater.scheduler,
                model_type=self.hf_config.model_type,
            )
        self.step = extra["step"]
        self.evaluated_step = extra.get("evaluated_step", self.step)  # older ones lack it
        self.algorithm_state = extra["algorithm"]
        return extra["driver"]

    def save(
        self,
        driver_state: dict[str, Any] | None,
        scores: dict[str, float],
        companion: Callable[[bool], PendingSave] | None = None,
    ) -> None:
        """Save a checkpoint of the current step. Collective.

        driver_state: The driver's state; None on other ranks. scores: Metrics by which checkpoints
        are compared; empty on other ranks. companion: See Saver.save.
        """
        with self.phases("checkpoint"), self.updater.state_on_device():
            self.saver.save(
                self.step,
                self.updater,
                extra={
                    "step": self.step,
                    "driver": driver_state,
                    "algorithm": self.algorithm_state,
                    "start": self.start,
                    "model": self.base,
                    "evaluated_step": self.evaluated_step,
                },
                scores=scores,
                companion=companion,
            )

    def is_due(self, every: int) -> bool:
        """Return True if the current step is a multiple of `every`; with 0 it never is."""
        return every > 0 and self.step % every == 0

    def start_step_clock(self) -> None:
        """Start the clock of a step. Seconds timed since the last step are added to
        `seconds_between_steps`.
        """
        seconds = self.phases.take()
        seconds["seconds/other"] = seconds_outside_phases(seconds)
        for name, value in seconds.items():
            phase = name.removeprefix("seconds/")
            if phase not in ("total", "evaluation"):  # an evaluation's own record has its seconds
                before = self.seconds_between_steps.get(phase, 0.0)
                self.seconds_between_steps[phase] = before + value


def beat_with_passes(model: Sequence[VisionLanguageModel], phases: Phases) -> None:
    """Report progress to the watchdog at each forward pass of a pack or of a round of images."""
    for chunk in model:
        for module in (chunk, chunk.visual):
            if module is not None:
                module.register_forward_hook(lambda *_: phases.beat())
