"""What every rank of a training run holds: mesh, model, updater, and the step it is at."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from megavlm import checkpointing
from megavlm.config.schema import GRPO, Config
from megavlm.data.packing import Pack
from megavlm.models.common.loading import HFFolder, load_hf
from megavlm.models.common.logprobs import Scoring
from megavlm.models.common.lora import add_adapters
from megavlm.models.registry import build_model, family
from megavlm.observability.phases import Phases
from megavlm.parallel import platform
from megavlm.parallel.collectives import reduce_measures
from megavlm.parallel.mesh import Mesh
from megavlm.training.guards import SkipCounter
from megavlm.training.optimizer import build_updater
from megavlm.training.options import lora, model_options
from megavlm.training.passes import LossFunction, VisionFeatures, forward_backward

CHECKPOINTS = "checkpoints"


class Session:
    """`step` counts finished training steps."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Builds this rank's part of the model with the weights that the run starts from."""
        self.config, self.mesh = config, mesh
        self.step = 0
        self.phases = Phases(platform.synchronize)
        self.seconds_between_steps: dict[str, float] = {}
        self.folder = Path(config.run.dir) / CHECKPOINTS
        self.hf_config = AutoConfig.from_pretrained(config.model.folder, local_files_only=True)
        self.entries = family(self.hf_config.model_type).mapping(self.hf_config)
        self.model = build_model(self.hf_config, mesh, model_options(config))
        self._load_start()
        if adapters := lora(config):
            for chunk in self.model:
                add_adapters(chunk, adapters, seed=config.run.seed)
        algorithm = config.algorithm
        self.updater = build_updater(
            self.model,
            config.optimizer,
            num_steps=algorithm.steps,
            updates_per_step=algorithm.minibatches if isinstance(algorithm, GRPO) else 1,
        )
        self._skips = SkipCounter()

    def _load_start(self) -> None:
        model = self.config.model
        if model.checkpoint is not None:
            checkpointing.load(model.checkpoint, chunks=self.model)
        else:
            for chunk in self.model:
                load_hf(chunk, self.entries, HFFolder(model.folder), self.mesh)

    def resume(self) -> dict[str, Any] | None:
        """Goes on from the run's latest checkpoint; None if there is none, else the driver's state
        in it.
        """
        if self.config.run.resume == "never" or checkpointing.latest(self.folder) is None:
            return None
        extra = checkpointing.load(
            self.folder,
            chunks=self.model,
            optimizer=self.updater.optimizer,
            scheduler=self.updater.scheduler,
        )
        self.step = extra["step"]
        return extra["driver"]

    def save(self, driver_state: dict[str, Any] | None) -> None:
        """Collective. `driver_state`: what the driver needs to go on, on every rank."""
        with self.phases("checkpoint"):
            checkpointing.save(
                self.folder,
                self.step,
                chunks=self.model,
                optimizer=self.updater.optimizer,
                scheduler=self.updater.scheduler,
                extra={"step": self.step, "driver": driver_state},
                hf_folder=Path(self.config.model.folder),
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
    ) -> dict[str, float]:
        """One optimizer step, or none if a gradient is not finite. Returns measures summed over all
        ranks.
        """
        self.updater.zero_gradients()
        reports = forward_backward(self.updater.chunks, packs, features, scoring, loss_function)
        measures = reduce_measures(reports, self.mesh)
        skipped = not self.updater.gradients_are_finite()
        self._skips.record(skipped, self.step + 1)
        measures["skipped_updates"] = float(skipped)
        measures["learning_rate"] = self.updater.learning_rate
        measures["gradient_norm"] = float("nan") if skipped else self.updater.step()
        return measures
