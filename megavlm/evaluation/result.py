"""What an evaluation found: shares in 0..1, overall and by category, with 95 % intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from typing import Any

from megavlm.config.evaluation import MEASURES
from megavlm.observability.text import failed_rewards

_Z = 1.959964  # of the normal distribution: 95 % lie within


@dataclass(frozen=True)
class Share:
    """`count` trials; `interval` is Wilson's, which stays in 0..1 and holds for few trials too."""

    share: float
    count: int
    interval: tuple[float, float]


@dataclass(frozen=True)
class Measure:
    overall: Share
    by_category: dict[str, Share]


@dataclass(frozen=True)
class EvaluationResult:
    """Of one policy on one set of rows.

    greedy: correct at temperature 0. sampled: correct at the rollout temperature, None if not
    asked for. valid: greedy responses that are an answer of the training rows of their category;
    None where these have none. blind: what the most frequent training answer to the same question
    would score, image unseen, over the rows that have answers; None where there are none.
    shuffled: greedy, with images exchanged between rows, over the rows where that can be done;
    None if not asked for or nowhere possible. failures: answers whose reward could not be computed,
    by kind; they are not correct.
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
        """The overall shares as one line to print."""
        shares = "  ".join(
            f"{name} {100 * found.overall.share:.1f} %"
            for name in MEASURES
            if (found := getattr(self, name)) is not None
        )
        count = self.greedy.overall.count
        failed = f"  {failed_rewards(self.failures)}" if self.failures else ""
        return f"evaluation{when}, {count} questions:  {shares}{failed}  ({self.seconds:.0f} s)"


def measure(hits: Sequence[bool], categories: Sequence[str]) -> Measure:
    """Shares of `hits`, one per row, whose categories are given beside them."""
    by_category: dict[str, list[bool]] = {}
    for hit, category in zip(hits, categories, strict=True):
        by_category.setdefault(category, []).append(hit)
    return Measure(_share(hits), {name: _share(by_category[name]) for name in sorted(by_category)})


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Source: E. B. Wilson, "Probable inference", JASA 22 (1927)."""
    share, square = successes / count, _Z**2 / count
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * sqrt(share * (1 - share) / count + square / (4 * count))
    # It holds the share itself, which rounding may leave outside at 0 and at 1.
    return min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share)


def _share(hits: Sequence[bool]) -> Share:
    successes = sum(hits)
    return Share(successes / len(hits), len(hits), wilson_interval(successes, len(hits)))
