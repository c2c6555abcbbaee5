"""Result of an evaluation: shares in 0..1, overall and by category, with 95 % intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megavlm.config.evaluation import MEASURES
from megavlm.evaluation.statistics import wilson_interval
from megavlm.observability.text import failed_rewards


@dataclass(frozen=True)
class Share:
    """Share of `count` trials with Wilson's interval."""

    share: float
    count: int
    interval: tuple[float, float]


@dataclass(frozen=True)
class Measure:
    overall: Share
    by_category: dict[str, Share]


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one policy on one set of rows.

    greedy: accuracy at temperature 0. sampled: accuracy at the rollout temperature, None if not
    requested. valid: share of greedy responses that occur as an answer in the training rows of
    their category; None if the training rows have no answers. blind: accuracy of the most frequent
    training answer to the same question, without the image, over the rows that have answers; None
    if no row has one. shuffled: greedy accuracy with images exchanged between rows, over the rows
    where an exchange is possible; None if not requested or not possible for any row. failures:
    number of responses whose reward could not be computed, by kind; they count as incorrect.
    """

    greedy: Measure
    sampled: Measure | None
    valid: Measure | None
    blind: Measure | None
    shuffled: Measure | None
    seconds: float
    failures: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self, when: str = "") -> str:
        """Return the overall shares as one line to print."""
        shares = "  ".join(
            f"{name} {100 * found.overall.share:.1f} %"
            for name in MEASURES
            if (found := getattr(self, name)) is not None
        )
        count = self.greedy.overall.count
        failed = f"  {failed_rewards(self.failures)}" if self.failures else ""
        return f"evaluation{when}, {count} questions:  {shares}{failed}  ({self.seconds:.0f} s)"


def measure(hits: Sequence[bool], categories: Sequence[str]) -> Measure:
    """Return the share of `hits`, one per row, overall and by category."""
    by_category: dict[str, list[bool]] = {}
    for hit, category in zip(hits, categories, strict=True):
        by_category.setdefault(category, []).append(hit)
    return Measure(_share(hits), {name: _share(by_category[name]) for name in sorted(by_category)})


def _share(hits: Sequence[bool]) -> Share:
    successes = sum(hits)
    return Share(successes / len(hits), len(hits), wilson_interval(successes, len(hits)))
