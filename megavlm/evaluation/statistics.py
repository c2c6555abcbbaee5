"""Estimates over questions, with 95 % intervals, and tests of two models on the same questions.

Questions are what is drawn from a population; attempts at one question are not independent of each
other, so nothing here counts them as if they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

import numpy as np

from megavlm.evaluation.result import wilson_interval

RESAMPLES = 2000
FLIPS = 10_000
_CHUNK = 2**22  # random numbers at a time
_SEED = 0  # intervals of the same numbers are the same


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` questions. method: wilson where each question is right or wrong, else
    bootstrap (percentiles of RESAMPLES means over questions drawn with replacement).
    """

    value: float
    count: int
    interval: tuple[float, float]
    method: Literal["wilson", "bootstrap"]


@dataclass(frozen=True)
class PairedTest:
    """A difference of means (first model minus second), a two-sided p-value, and how often each
    was the better one. method: mcnemar (exact) where each question is right or wrong, else
    sign_flip (FLIPS random exchanges of the two models' values of a question).
    """

    difference: float
    count: int
    interval: tuple[float, float]  # paired bootstrap over questions
    p_value: float
    method: Literal["mcnemar", "sign_flip"]
    first_better: int
    second_better: int


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """The unbiased estimate of the chance that one of k attempts is correct, from at least k.

    1 - C(n - c, k) / C(n, k). Source: Chen et al., "Evaluating large language models trained on
    code", arXiv 2107.03374.
    """
    assert 0 <= correct <= attempts and 1 <= k <= attempts
    return 1 - comb(attempts - correct, k) / comb(attempts, k)


def estimate(values: Sequence[float]) -> Estimate:
    """Of one value for each question."""
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if _is_binary(array):
        interval = wilson_interval(int(array.sum()), len(array))
        return Estimate(mean, len(array), interval, "wilson")
    return Estimate(mean, len(array), _bootstrap(array), "bootstrap")


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Of the same questions in the same order."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    assert len(a) == len(b) > 0
    difference = a - b
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    binary = _is_binary(a) and _is_binary(b)
    return PairedTest(
        difference=float(difference.mean()),
        count=len(a),
        interval=_bootstrap(difference),
        p_value=mcnemar(better, worse) if binary else _sign_flip(difference),
        method="mcnemar" if binary else "sign_flip",
        first_better=better,
        second_better=worse,
    )


def mcnemar(first_only: int, second_only: int) -> float:
    """Exact two-sided p-value of the discordant questions: a binomial test against one half."""
    total, fewer = first_only + second_only, min(first_only, second_only)
    tail = sum(comb(total, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**total)


def _is_binary(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _bootstrap(values: np.ndarray) -> tuple[float, float]:
    rng = np.random.default_rng(_SEED)
    rows = max(_CHUNK // len(values), 1)
    sizes = [min(rows, RESAMPLES - start) for start in range(0, RESAMPLES, rows)]
    drawn = (rng.integers(0, len(values), (size, len(values))) for size in sizes)
    means = np.concatenate([values[indices].mean(1) for indices in drawn])
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def _sign_flip(difference: np.ndarray) -> float:
    """The share of random sign changes whose mean is as far from zero."""
    rng = np.random.default_rng(_SEED)
    # Rounding may make equal sums differ in their last digits.
    least = abs(difference.sum()) * (1 - 1e-9)
    chunk = max(_CHUNK // len(difference), 1)
    as_far = 0
    for start in range(0, FLIPS, chunk):
        size = (min(chunk, FLIPS - start), len(difference))
        signs = rng.integers(0, 2, size, dtype=np.int8) * 2 - 1
        as_far += int((np.abs(signs @ difference) >= least).sum())
    return (1 + as_far) / (1 + FLIPS)
