"""What every rank of a training run holds: mesh, model, updater, and the step it is at."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig

from megavlm import checkpointing
from megavlm.checkpointing import Saving
from megavlm.config.schema import PPO, Config
from megavlm.data.packing import Pack
from megavlm.models.common.logprobs import Scoring
from megavlm.models.registry import family
from megavlm.observability.phases import Phases
from megavlm.parallel import platform
from megavlm.parallel.collectives import broadcast_object
from megavlm.parallel.mesh import Mesh
from megavlm.training.forward_backward import LossFunction, VisionFeatures
from megavlm.training.guards import SkipCounter
from megavlm.training.initial_model import adapter_settings, start_model, starting_step
from megavlm.training.optimizer import build_updater
from megavlm.training.update import update

CHECKPOINTS = "checkpoints"


class TrainState:
    """`step` counts finished training steps."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Builds this rank's part of the model with the weights that the run starts from."""
        self.config, self.mesh = config, mesh
        self.step = 0
        self.phases = Phases(platform.synchronize)
        self.algorithm_state: dict[str, float] = {}  # of its own, the same on all ranks
        self.seconds_between_steps: dict[str, float] = {}
        self.folder = Path(config.run.dir) / CHECKPOINTS
        self.hf_config = AutoConfig.from_pretrained(config.model.folder, local_files_only=True)
        self.entries = family(self.hf_config.model_type).mapping(self.hf_config)
        algorithm = config.algorithm
        is_shared = isinstance(algorithm, PPO) and algorithm.critic == "shared"
        head: Literal["tokens", "both"] = "both" if is_shared else "tokens"
        self.start = starting_step(config)
        self.model = start_model(config, self.start, self.hf_config, self.entries, mesh, head)
        self.updater = build_updater(
            self.model,
            config.optimizer,
            num_steps=algorithm.policy_steps,
            updates_per_step=algorithm.updates_per_step,
            value_head_lr=algorithm.critic_lr if isinstance(algorithm, PPO) else None,
        )
        self._skips = SkipCounter()
        kept = config.checkpoint
        self.saver = checkpointing.Saver(
            self.folder,
            hf_folder=Path(config.model.folder),
            adapters=adapter_settings(config, self.start),
            retention=checkpointing.Retention(
                last=kept.keep_last,
                every=kept.keep_every,
                metric=kept.best_metric,
                higher_is_better=kept.best_mode == "max",
            ),
            background=kept.async_save,
        )

    def resume(self) -> dict[str, Any] | None:
        """Goes on from the step that the configuration names, or from the run's latest checkpoint;
        None if there is none, else the driver's state in it.
        """
        if self.config.run.resume == "never":
            return None
        step = self.config.checkpoint.step
        if step is None:  # one rank looks, and one warns if it has to
            found = checkpointing.latest(self.folder) if self.mesh.is_driver else None
            step = broadcast_object(found, self.mesh)
        if step is None:
            return None
        extra = checkpointing.load(
            self.folder,
            step=step,
            chunks=self.model,
            optimizer=self.updater.optimizer,
            scheduler=self.updater.scheduler,
        )
        self.step = extra["step"]
        self.algorithm_state = extra["algorithm"]
        return extra["driver"]

    def save(
        self,
        driver_state: dict[str, Any] | None,
        scores: dict[str, float],
        companion: Callable[[bool], Saving] | None = None,
    ) -> None:
        """Collective. `driver_state`: what the driver needs to go on, and `scores`, what the run's
        checkpoints are compared by, as the driver has them. `companion`: see Saver.save.
        """
        with self.phases("checkpoint"):
            self.saver.save(
                self.step,
                chunks=self.model,
                optimizer=self.updater.optimizer,
                scheduler=self.updater.scheduler,
                extra={
                    "step": self.step,
                    "driver": driver_state,
                    "algorithm": self.algorithm_state,
                },
                scores=scores,
                companion=companion,
            )

    def start_step_clock(self) -> None:
        """What has been timed since the last step belongs to none."""
        for name, seconds in self.phases.take().items():
            phase = name.removeprefix("seconds/")
            if phase != "total":
                before = self.seconds_between_steps.get(phase, 0.0)
                self.seconds_between_steps[phase] = before + seconds

    def update(
        self,
        packs: Sequence[Pack],
        features: VisionFeatures,
        scoring: Scoring,
        loss_function: LossFunction,
        *,
        value_head_alone: bool = False,
    ) -> dict[str, float]:
        """One optimizer step, or none if a gradient is not finite, or is rounding alone. Returns
        measures summed over all ranks.
        """
        return update(
            self.updater,
            packs,
            features,
            scoring,
            loss_function,
            self.mesh,
            self._skips,
            self.step,
            value_head_alone=value_head_alone,
        )
