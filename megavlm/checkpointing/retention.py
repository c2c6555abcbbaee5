"""Selection of the steps of a run that are kept on disk, and of the best step."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megavlm.checkpointing import atomic
from megavlm.checkpointing.folder import BEST, Manifest, complete_steps, step_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Rule that keeps a step if it is one of the `last`, a multiple of `every`, or the best by
    `metric`.

    last: Number of latest steps that are kept; None keeps all steps.
    every: None keeps no other steps.

    Among steps with equal values the earliest is the best. A step whose metric is missing or not
    finite is never the best.
    """

    last: int | None = None
    every: int | None = None
    metric: str | None = None
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        assert self.last is None or self.last > 0, "the latest step is always kept"

    def best(self, scores: Mapping[int, Mapping[str, float]]) -> int | None:
        """Return the best step, None if no step has a finite metric.

        scores: Maps a step to its values by metric.
        """
        found: dict[int, float] = {}
        for step, values in sorted(scores.items()):
            value = math.nan if self.metric is None else values.get(self.metric, math.nan)
            if math.isfinite(value):
                found[step] = value if self.higher_is_better else -value
        return max(found, key=found.__getitem__, default=None)

    def kept(self, steps: Sequence[int], best: int | None) -> set[int]:
        """Return the steps to keep. `steps` are all complete steps up to the latest one."""
        newest_first = sorted(steps, reverse=True)
        return {
            step
            for age, step in enumerate(newest_first)
            if self.last is None
            or age < self.last
            or (self.every is not None and step % self.every == 0)
            or step == best
        }


def prune(folder: Path, latest: int, retention: Retention) -> None:
    """Write the name of the best step and delete the steps that `retention` does not keep.

    latest: A complete step. Later steps are not touched: a run that went back to an earlier step
        has not reached them again.

    Logs a warning if a step cannot be deleted.
    """
    steps = [step for step in complete_steps(folder) if step <= latest]
    best = None
    if retention.metric is not None:
        best = retention.best({step: _scores(folder, step) for step in steps})
    if best is not None:
        atomic.write_text(folder / BEST, f"{step_folder(folder, best).name}\n")
    for step in sorted(set(steps) - retention.kept(steps, best)):
        path = step_folder(folder, step)
        try:
            atomic.remove_folder(path)
        except OSError as error:
            logger.warning("%s could not be deleted: %s.", path, error)


def _scores(folder: Path, step: int) -> Mapping[str, float]:
    try:
        return Manifest.read(step_folder(folder, step)).scores
    except ValueError as error:  # a manifest that was damaged later: the step is never the best
        logger.warning("%s", error)
        return {}
