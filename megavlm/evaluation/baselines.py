"""What can be had without looking: answers learnt from training rows by their text alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megavlm.data.rows import Row


def blind_answers(train: Sequence[Row], test: Sequence[Row]) -> list[str]:
    """For each test row the most frequent training answer to the same question; to a question that
    training does not hold, the most frequent answer of its category, or of all rows.
    """
    by_question: dict[str, Counter[str]] = {}
    by_category: dict[str, Counter[str]] = {}
    overall: Counter[str] = Counter()
    for row in train:
        by_question.setdefault(row.problem, Counter())[row.answer] += 1
        by_category.setdefault(row.category, Counter())[row.answer] += 1
        overall[row.answer] += 1
    return [
        _most_frequent(by_question.get(row.problem) or by_category.get(row.category) or overall)
        for row in test
    ]


def answers_by_category(rows: Sequence[Row]) -> dict[str, set[str]]:
    answers: dict[str, set[str]] = {}
    for row in rows:
        answers.setdefault(row.category, set()).add(row.answer)
    return answers


def exchange_pictures(rows: Sequence[Row], seed: int) -> list[Row]:
    """The rows with pictures of other rows, among those that show equally many.

    A row alone with its number of pictures keeps its own.
    """
    rng = np.random.default_rng(seed)
    exchanged = list(rows)
    by_number: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_number.setdefault(len(row.images), []).append(index)
    for indices in by_number.values():
        # A random cycle: nobody keeps their own.
        order = rng.permutation(indices)
        for receiver, giver in zip(order, np.roll(order, 1), strict=True):
            exchanged[receiver] = replace(rows[receiver], images=rows[giver].images)
    return exchanged


def _most_frequent(counts: "Counter[str]") -> str:
    """Of equally frequent answers the first in the alphabet, whatever the order of the rows."""
    return min(counts, key=lambda answer: (-counts[answer], answer))
