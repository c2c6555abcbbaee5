"""What can be had without looking: answers learnt from training rows by their text alone."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from megavlm.data.rows import Row


@dataclass(frozen=True)
class Known:
    """What training rows tell of test rows. guesses: blind answers to the test rows; None where
    either have no answers, so that there is nothing to guess. valid: answers by category.
    """

    guesses: Sequence[str] | None
    valid: Mapping[str, Set[str]]

    @classmethod
    def of(cls, train: Iterable[Row], test: Sequence[Row]) -> "Known":
        answered = [row for row in train if row.answer]
        told = bool(answered) and any(row.answer for row in test)
        return cls(blind_answers(answered, test) if told else None, answers_by_category(answered))


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


def exchange_images(rows: Sequence[Row], seed: int) -> list[Row]:
    """The rows with images of other rows, among those that show equally many; in their order.

    Rows that cannot get other images than their own are left out: those without images, alone
    with their number of images, or of a set in which most rows show the same ones.
    """
    rng = np.random.default_rng(seed)
    groups: dict[int, dict[tuple[bytes, ...], list[int]]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(len(row.images), {}).setdefault(row.images, []).append(index)
    exchanged: dict[int, Row] = {}
    for same in groups.values():
        # Rows of the same images stand side by side: a shift by the most frequent ones' number
        # takes everybody to other images.
        blocks = list(same.values())
        order = [index for block in rng.permutation(len(blocks)) for index in blocks[block]]
        source_ranks = np.roll(order, max(map(len, blocks)))
        for receiver, source_rank in zip(order, source_ranks, strict=True):
            if rows[source_rank].images != rows[receiver].images:
                exchanged[receiver] = replace(rows[receiver], images=rows[source_rank].images)
    return [exchanged[index] for index in sorted(exchanged)]


def _most_frequent(counts: "Counter[str]") -> str:
    """Of equally frequent answers the first in the alphabet, whatever the order of the rows."""
    return min(counts, key=lambda answer: (-counts[answer], answer))
