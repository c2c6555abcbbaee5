"""Metrics of a run: metrics.jsonl and evaluations.jsonl in its folder, TensorBoard events, and text
for Prometheus.

docs/reference/metrics.md says what each name means.
"""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

from megavlm.observability.prometheus import METRICS_TEXT, metrics_text
from megavlm.observability.records import (
    append_record,
    keep_records,
    read_records,
    write_records,
)
from megavlm.writing import write_whole

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"


def reward_points(run_dir: Path | str) -> list[tuple[int, float]]:
    """Return (step, reward) of each step that has one."""
    return [
        (record["step"], record["reward"])
        for record in read_records(Path(run_dir) / METRICS_FILE)
        if record.get("reward") is not None
    ]


def evaluation_scalars(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return an evaluation as metrics: `evaluation/<measure>`, `evaluation/<measure>/<category>`,
    and `evaluation/failures`, the number of responses whose reward failed.
    """
    scalars = {}
    for name, measure in evaluation.items():
        if name == "failures":
            scalars[f"evaluation/{name}"] = float(sum(measure.values()))
        elif isinstance(measure, Mapping):
            scalars[f"evaluation/{name}"] = measure["overall"]["share"]
            for category, share in measure["by_category"].items():
                scalars[f"evaluation/{name}/{category}"] = share["share"]
    return scalars


class MetricsWriter:
    """Writer of a run's metrics; used by one process, the driver."""

    def __init__(self, folder: Path | str, start_step: int = 0) -> None:
        """Open the files of a run.

        start_step: number of updates already done. Records of an earlier process beyond that step
        are deleted, so that no step occurs twice; with 0 all records are deleted.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, EVALUATIONS_FILE):
            keep_records(
                self.folder / name,
                lambda record: start_step > 0 and record["step"] <= start_step,
            )
        self._last_step = start_step
        # TensorBoard then ignores events of older files from this step on.
        self._events: SummaryWriter | None = self._open(start_step + 1 if start_step else 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one training step. Steps must rise. Raises OSError if the disk is full; later steps
        may still be written.
        """
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        self._last_step = step
        values = {name: float(value) for name, value in metrics.items()}
        record = {"step": step, "time": round(time.time(), 3), **values}
        append_record(self.folder / METRICS_FILE, record)
        text = metrics_text(self.folder.resolve().name, record)
        write_whole(self.folder / METRICS_TEXT, text)
        self._scalars(step, values)

    def write_evaluation(self, step: int, evaluation: Mapping[str, Any]) -> None:
        """Write the evaluation after `step` updates. It replaces an earlier one of that step."""
        path = self.folder / EVALUATIONS_FILE
        others = [record for record in read_records(path) if record["step"] != step]
        record = {"step": step, "time": round(time.time(), 3), **evaluation}
        write_records(path, [*others, record])
        self._scalars(step, evaluation_scalars(evaluation))

    def _open(self, purge_step: int | None = None) -> SummaryWriter:
        return SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge_step)

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._events = self._events or self._open()
        try:
            for name, value in values.items():
                if math.isfinite(value):
                    self._events.add_scalar(name, value, step)
            self._events.flush()
        except OSError:  # the writer's thread has ended: the next step opens another file
            events, self._events = self._events, None
            with suppress(OSError):
                events.close()
            raise

    def close(self) -> None:
        (self.folder / METRICS_TEXT).unlink(missing_ok=True)
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
