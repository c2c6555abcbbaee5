"""Measures of one model, and paired tests of two: overall, by category and by data set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megavlm.evaluation.attempts import Question
from megavlm.evaluation.statistics import Estimate, PairedTest, estimate, paired_test, pass_at_k

T = TypeVar("T")
Estimates = dict[str, Estimate]


@dataclass(frozen=True)
class MeasureTable:
    """Measures of one model.

    They are pass@k (for k = 1, 2, 4, ... and the number of samples), mean@n (accuracy over all n
    samples), reward and response_tokens.
    """

    overall: Estimates
    by_category: dict[str, Estimates]
    by_dataset: dict[str, Estimates]


@dataclass(frozen=True)
class ModelComparison:
    """Paired tests of accuracy and reward on the questions that both models answered."""

    accuracy: PairedTest
    reward: PairedTest
    by_category: dict[str, PairedTest]  # tests of accuracy
    by_dataset: dict[str, PairedTest]


def tabulate(questions: Sequence[Question]) -> MeasureTable:
    return MeasureTable(
        compute_measures(questions),
        {name: compute_measures(part) for name, part in by(questions, category).items()},
        {name: compute_measures(part) for name, part in by(questions, dataset).items()},
    )


def compute_measures(questions: Sequence[Question]) -> Estimates:
    n = min(len(question.attempts) for question in questions)
    found = {
        f"pass@{k}": estimate([pass_at_k(len(q.attempts), q.num_correct, k) for q in questions])
        for k in _ks(n)
    }
    found[f"mean@{n}"] = estimate([question.accuracy for question in questions])
    found["reward"] = estimate([question.reward for question in questions])
    found["response_tokens"] = estimate(
        [sum(a.num_tokens for a in q.attempts) / len(q.attempts) for q in questions]
    )
    return found


def compare_models(first: Sequence[Question], second: Sequence[Question]) -> ModelComparison | None:
    """Compare two models. Returns None if they have no question in common."""
    of_second = {question.row.index: question for question in second}
    both = [(q, of_second[q.row.index]) for q in first if q.row.index in of_second]
    if not both:
        return None

    def accuracy(pairs: Sequence[tuple[Question, Question]]) -> PairedTest:
        return paired_test([a.accuracy for a, _ in pairs], [b.accuracy for _, b in pairs])

    def accuracies(name: Callable[[Question], str]) -> dict[str, PairedTest]:
        parts = by(both, lambda pair: name(pair[0]))
        return {key: accuracy(part) for key, part in parts.items()}

    return ModelComparison(
        accuracy=accuracy(both),
        reward=paired_test([a.reward for a, _ in both], [b.reward for _, b in both]),
        by_category=accuracies(category),
        by_dataset=accuracies(dataset),
    )


def category(question: Question) -> str:
    return question.row.category


def dataset(question: Question) -> str:
    return question.row.dataset


def by(items: Sequence[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    parts: dict[str, list[T]] = {}
    for item in items:
        parts.setdefault(name(item), []).append(item)
    return dict(sorted(parts.items()))


def _ks(n: int) -> list[int]:
    """Return 1, 2, 4, ... and n."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
