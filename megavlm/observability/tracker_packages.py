"""Runs of experiment trackers, each over its own package: Weights & Biases, SwanLab and MLflow.

Where they write, and with which key, is given by the environment variables of their packages.
"""

import importlib
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

PROJECT = "megavlm"  # unless the environment names one


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers show it. id: in the tracker, None if it is to make one."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class TrackedImage:
    """Image of a sampled prompt. caption: the prompt and its first response."""

    path: Path
    caption: str


class Tracker(Protocol):
    """Run in a tracker's package, whose functions may raise anything."""

    def __init__(self, run: TrackedRun) -> None:
        """Begin the run, or continue that of the id."""

    id: str

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def images(self, step: int, images: Sequence[TrackedImage]) -> None: ...

    def close(self) -> None: ...


class WandbTracker:
    """Run of Weights & Biases, whose own step must rise: a resumed run repeats steps."""

    def __init__(self, run: TrackedRun) -> None:
        self._wandb = importlib.import_module("wandb")
        self.id = run.id or uuid.uuid4().hex[:8]
        self._run = self._wandb.init(
            project=None if "WANDB_PROJECT" in os.environ else PROJECT,
            id=self.id,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            resume="allow",
            reinit="create_new",
            settings=self._wandb.Settings(console="off"),  # the live line is no log
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def images(self, step: int, images: Sequence[TrackedImage]) -> None:
        shown = [self._wandb.Image(str(image.path), caption=image.caption) for image in images]
        self._run.log({"step": step, "samples": shown})

    def close(self) -> None:
        self._run.finish()


class SwanlabTracker:
    """Run of SwanLab."""

    def __init__(self, run: TrackedRun) -> None:
        self._swanlab = importlib.import_module("swanlab")
        self.id = run.id or uuid.uuid4().hex[:21]
        (run.folder / "swanlog").mkdir(exist_ok=True)
        self._run = self._swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
            name=run.name,
            log_dir=str(run.folder / "swanlog"),
            config=dict(run.config),
            id=self.id,
            resume="allow",
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def images(self, step: int, images: Sequence[TrackedImage]) -> None:
        shown = [self._swanlab.Image(str(image.path), caption=image.caption) for image in images]
        self._run.log({"samples": shown}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """Run of MLflow, which makes the id itself."""

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow = importlib.import_module("mlflow")
        if "MLFLOW_EXPERIMENT_NAME" not in os.environ:
            self._mlflow.set_experiment(PROJECT)
        started = self._mlflow.start_run(run_id=run.id, run_name=run.name)
        self.id = started.info.run_id
        self._mlflow.log_dict(dict(run.config), "config.yaml")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        # In its stores of files `reward` and `reward/red` would be a file and a folder.
        named = {re.sub(r"[^\w\-. ]", ".", name): value for name, value in values.items()}
        self._mlflow.log_metrics(named, step=step)

    def images(self, step: int, images: Sequence[TrackedImage]) -> None:
        for number, shown in enumerate(images):
            with Image.open(shown.path) as image:
                self._mlflow.log_image(image, artifact_file=f"samples/{step}/{number}.png")
        captions = "\n\n".join(shown.caption for shown in images)
        self._mlflow.log_text(captions, f"samples/{step}/captions.txt")

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, type[Tracker]] = {
    "wandb": WandbTracker,
    "swanlab": SwanlabTracker,
    "mlflow": MlflowTracker,
}
