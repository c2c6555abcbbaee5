"""The metric by which a run's checkpoints are compared."""

import math
from collections.abc import Mapping

from megavlm.config.evaluation import EVALUATION


class BestMetricTracker:
    """Value of a metric for the next checkpoint. A training metric is averaged over the steps since
    the last checkpoint, because a single step is noisy. An evaluation metric is the value at the
    evaluated step.
    """

    def __init__(self, metric: str | None) -> None:
        self.metric = metric
        self._values: list[float] = []

    def step(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a training step. Raises ValueError if the run does not have the
        metric.
        """
        if self.metric is None or self.metric.startswith(EVALUATION):
            self._values = []  # an earlier evaluation no longer describes these weights
            return
        category = self.metric.rpartition("/")[0]  # not every step has prompts of each category
        if self.metric not in metrics and category not in metrics:
            raise ValueError(
                f"checkpoint.best_metric={self.metric} is not measured by this run: choose one of "
                f"{', '.join(name for name in metrics if not name.startswith('seconds/'))}"
            )
        value = metrics.get(self.metric, math.nan)
        if math.isfinite(value):
            self._values.append(value)

    def evaluation(self, scalars: Mapping[str, float]) -> None:
        """Set the value from an evaluation of the current weights."""
        if self.metric is not None and self.metric in scalars:
            self._values = [scalars[self.metric]]

    def take(self) -> dict[str, float]:
        """Return {metric: value} for a checkpoint, or an empty dict if there is no value, and reset
        the tracker.
        """
        values, self._values = self._values, []
        if self.metric is None or not values:
            return {}
        return {self.metric: sum(values) / len(values)}
