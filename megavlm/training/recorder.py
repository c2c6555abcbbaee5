"""The records of a run: metrics, samples, evaluations, trackers, rollouts for replay, and the lines
that it prints.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megavlm.config.schema import Config
from megavlm.evaluation.result import EvaluationResult
from megavlm.observability.console import legend, step_line
from megavlm.observability.metrics import MetricsWriter, evaluation_scalars
from megavlm.observability.progress import Progress
from megavlm.observability.records import append_record, keep_records
from megavlm.observability.samples import SampleWriter
from megavlm.observability.trackers import Trackers
from megavlm.rollout.recorded import ROLLOUTS_FOLDER, RecordedRollouts
from megavlm.rollout.trajectory import Group
from megavlm.training.best_metric import BestMetricTracker

SKIPPED_FILE = "skipped_updates.jsonl"  # in the run directory: rows of steps that skipped an update
LINE_EVERY = 1.0  # minimum seconds between printed steps; the records have every step


class Recorder:
    """Writer of a run's records. A record that cannot be written is reported once, counted, and
    does not end the run.
    """

    def __init__(self, config: Config, progress: Progress, step: int) -> None:
        """Open the records at `step`. A resumed run makes the steps after its checkpoint again, so
        their records are dropped.
        """
        self._config, self._progress = config, progress
        self._run_dir, self._num_steps = Path(config.run.dir), config.algorithm.steps
        self._last_line: float | None = None  # when a step was last printed
        self._metrics = MetricsWriter(config.run.dir, step)
        self._samples = SampleWriter(config.run.dir, step, num_steps=self._num_steps)
        self._trackers = Trackers(config.run.trackers, config.run.dir, config.to_dict(), step)
        self.best_metric = BestMetricTracker(config.checkpoint.best_metric)
        self.rollouts = RecordedRollouts(self._run_dir / ROLLOUTS_FOLDER)
        keep_records(self._run_dir / SKIPPED_FILE, lambda record: record["step"] <= step)
        if config.run.record_rollouts:
            self.rollouts.remove_after(step)

    def record_step(
        self,
        step: int,
        metrics: dict[str, float],
        samples: Sequence[Mapping[str, Any]],
        rows: Sequence[str] = (),
    ) -> None:
        """Record a finished step. rows: Sources of its rows, recorded if an update was skipped."""
        progress = self._progress
        if progress.failures:
            metrics["recording_failures"] = float(progress.failures)
        if self._config.run.trackers:
            metrics["tracker_failures"] = float(self._trackers.failures)
        progress.attempt("metrics", lambda: self._metrics.write(step, metrics))
        self._trackers.scalars(step, metrics)
        self.best_metric.step(metrics)
        if metrics.get("skipped_updates"):
            record = {"step": step, "rows": list(rows)}
            path = self._run_dir / SKIPPED_FILE
            progress.attempt("skipped updates", lambda: append_record(path, record))
        written = progress.attempt("samples", lambda: self._samples.write(step, samples))
        self._trackers.samples(step, written or (), self._samples.folder)
        self._print(step, metrics)

    def record_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Write a step's groups for a replay."""
        self._progress.attempt("rollouts", lambda: self.rollouts.save(step, groups))

    def record_evaluation(self, step: int, result: EvaluationResult) -> None:
        scalars = evaluation_scalars(result.to_dict())
        self._progress.attempt(
            "evaluations", lambda: self._metrics.write_evaluation(step, result.to_dict())
        )
        self._trackers.scalars(step, scalars)
        self.best_metric.evaluation(scalars)
        self._progress.line(result.line(f" after {step} steps"))

    def close(self) -> None:
        self._progress.attempt("metrics", self._metrics.close)
        self._trackers.close()

    def _print(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if self._last_line is None:
            self._progress.line(legend(metrics))
        elif now - self._last_line < LINE_EVERY and step < self._num_steps:
            return
        self._last_line = now
        self._progress.line(step_line(step, self._num_steps, metrics))
