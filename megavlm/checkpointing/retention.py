"""Which steps of a run stay on the disk, and which of them is the best."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megavlm.checkpointing import atomic
from megavlm.checkpointing import folder as form

BEST = "best"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """A step stays if it is one of the `last`, a multiple of `every`, or the best by `metric`.

    `last` None: all stay. `every` None: no multiple stays for being one. Among equals the earlier
    step is the best; a step whose metric was not measured, or is not finite, is none.
    """

    last: int | None = None
    every: int | None = None
    metric: str | None = None
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        assert self.last is None or self.last > 0, "the latest step always stays"

    def best(self, scores: Mapping[int, Mapping[str, float]]) -> int | None:
        """`scores`: step -> metric -> value."""
        found: dict[int, float] = {}
        for step, values in sorted(scores.items()):
            value = math.nan if self.metric is None else values.get(self.metric, math.nan)
            if math.isfinite(value):
                found[step] = value if self.higher_is_better else -value
        return max(found, key=found.__getitem__, default=None)

    def kept(self, steps: Sequence[int], best: int | None) -> set[int]:
        """Of `steps`, all of them complete, the newest being the latest."""
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
    """Names the best step and deletes those that do not stay; `latest` is complete.

    Later steps, which a run that went back has not reached again, are left alone. A step that
    cannot be deleted is a warning: the run is as well as before.
    """
    steps = [step for step in form.complete_steps(folder) if step <= latest]
    best = None
    if retention.metric is not None:
        best = retention.best({step: _scores(folder, step) for step in steps})
    if best is not None:
        atomic.write_text(folder / BEST, f"{form.step_folder(folder, best).name}\n")
    for step in sorted(set(steps) - retention.kept(steps, best)):
        path = form.step_folder(folder, step)
        try:
            atomic.remove_folder(path)
        except OSError as error:
            logger.warning("%s was to be deleted, and cannot be: %s.", path, error)


def _scores(folder: Path, step: int) -> Mapping[str, float]:
    try:
        return form.Manifest.read(form.step_folder(folder, step)).scores
    except ValueError as error:  # damaged since: a load would say so, and it is not the best
        logger.warning("%s", error)
        return {}
