"""Estimates over questions with 95 % intervals, and paired tests of two models.

Questions are drawn from a population; attempts at one question are not independent of each other,
so nothing here counts them as if they were. Intervals and tests are scipy's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from types import ModuleType
from typing import Literal

import numpy as np

RESAMPLES = 2000
FLIPS = 10_000
_CHUNK = 2**22  # random numbers that are drawn at a time, to bound memory
_SEED = 0  # the same numbers give the same interval


@dataclass(frozen=True)
class Estimate:
    """Mean over `count` questions with its interval.

    method: wilson if each question is either right or wrong, otherwise bootstrap (percentiles of
    RESAMPLES means over questions drawn with replacement).
    """

    value: float
    count: int
    interval: tuple[float, float]
    method: Literal["wilson", "bootstrap"]


@dataclass(frozen=True)
class PairedTest:
    """Difference of means (first model minus second), its two-sided p-value, and how often each
    model was better.

    method: mcnemar (exact) if each question is either right or wrong, otherwise sign_flip
    (exchanges the two models' values of a question, in all ways or in FLIPS random ones).
    """

    difference: float
    count: int
    interval: tuple[float, float]  # paired bootstrap over questions
    p_value: float
    method: Literal["mcnemar", "sign_flip"]
    first_better: int
    second_better: int


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, the chance that one of k attempts is correct.

    It is 1 - C(n - c, k) / C(n, k) for n >= k attempts. Source: Chen et al., "Evaluating large
    language models trained on code", arXiv 2107.03374.
    """
    assert 0 <= correct <= attempts and 1 <= k <= attempts
    return 1 - comb(attempts - correct, k) / comb(attempts, k)


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share. It stays in 0..1, and is also valid for few trials.

    Source: E. B. Wilson, "Probable inference", JASA 22 (1927).
    """
    interval = _stats().binomtest(successes, count).proportion_ci(method="wilson")
    # At 0 and at 1, rounding may leave the share itself outside of the interval.
    share = successes / count
    return min(float(interval.low), share), max(float(interval.high), share)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value for each question, with its interval."""
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if _is_binary(array):
        interval = wilson_interval(int(array.sum()), len(array))
        return Estimate(mean, len(array), interval, "wilson")
    return Estimate(mean, len(array), _bootstrap(array), "bootstrap")


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Compare two models on the same questions in the same order."""
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
    """Return the exact two-sided p-value of the discordant questions."""
    total = first_only + second_only
    return float(_stats().binomtest(first_only, total).pvalue) if total else 1.0


def _is_binary(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _bootstrap(values: np.ndarray) -> tuple[float, float]:
    if values.min() == values.max():  # all resamples are equal, and scipy refuses a single value
        return float(values[0]), float(values[0])
    found = _stats().bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=max(_CHUNK // len(values), 1),
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _sign_flip(difference: np.ndarray) -> float:
    if len(difference) == 1:  # both signs are as far from zero
        return 1.0
    found = _stats().permutation_test(
        (difference,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=FLIPS,
        batch=max(_CHUNK // len(difference), 1),
        rng=np.random.default_rng(_SEED),
    )
    return float(found.pvalue)


def _stats() -> ModuleType:
    import scipy.stats  # takes a second to load, and runs without evaluation do not need it

    return scipy.stats
