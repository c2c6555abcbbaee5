"""Blind baselines: answers guessed from training rows by their text, and exchanged images."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from megavlm.data.chat.messages import Message, without_placeholders
from megavlm.data.media.video_sources import AnyVideo
from megavlm.data.rows import Row


@dataclass(frozen=True)
class Known:
    """Facts about test rows learnt from training rows.

    guesses: blind answers to the test rows, None if the test rows or the training rows have no
    answers. valid: training answers by category.
    """

    guesses: Sequence[str] | None
    valid: Mapping[str, Set[str]]

    @classmethod
    def of(cls, train: Iterable[Row], test: Sequence[Row]) -> "Known":
        answered = [row for row in train if row.answer]
        can_guess = bool(answered) and any(row.answer for row in test)
        return cls(
            blind_answers(answered, test) if can_guess else None, answers_by_category(answered)
        )


def blind_answers(train: Sequence[Row], test: Sequence[Row]) -> list[str]:
    """Return for each test row the most frequent training answer to the same question; for a
    question that is not in the training rows, the most frequent answer of its category, or of all
    rows.
    """
    by_question: dict[Hashable, Counter[str]] = {}
    by_category: dict[str, Counter[str]] = {}
    overall: Counter[str] = Counter()
    for row in train:
        by_question.setdefault(_question(row), Counter())[row.answer] += 1
        by_category.setdefault(row.category, Counter())[row.answer] += 1
        overall[row.answer] += 1
    return [
        _most_frequent(by_question.get(_question(row)) or by_category.get(row.category) or overall)
        for row in test
    ]


def _question(row: Row) -> Hashable:
    """Return the texts of a row's prompt. Placeholders are left out: images that no placeholder
    marks come first.
    """
    messages = row.messages or (Message("user", row.problem),)
    return tuple((message.role, without_placeholders(message.text).strip()) for message in messages)


def answers_by_category(rows: Sequence[Row]) -> dict[str, set[str]]:
    answers: dict[str, set[str]] = {}
    for row in rows:
        answers.setdefault(row.category, set()).add(row.answer.strip())  # as responses are
    return answers


def exchange_images(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return the rows, in order, each with the images, videos and audio of another row that has as
    many.

    A row is left out if it cannot get others: it has none, no other row has as many, or most rows
    with as many share the same ones.
    """
    rng = np.random.default_rng(seed)
    groups: dict[tuple[int, ...], dict[Hashable, list[int]]] = {}
    for index, row in enumerate(rows):
        media = _media(row)
        groups.setdefault((*map(len, media),), {}).setdefault(media, []).append(index)
    exchanged: dict[int, Row] = {}
    for same in groups.values():
        # Rows with the same images are neighbours: a shift by the size of the largest such block
        # gives every row other images.
        blocks = list(same.values())
        order = [index for block in rng.permutation(len(blocks)) for index in blocks[block]]
        sources = np.roll(order, max(map(len, blocks)))
        for receiver, source in zip(order, sources, strict=True):
            images, videos, audio = media = _media(rows[source])
            if media != _media(rows[receiver]):
                exchanged[receiver] = replace(
                    rows[receiver], images=images, videos=videos, audio=audio
                )
    return [exchanged[index] for index in sorted(exchanged)]


def _media(row: Row) -> tuple[tuple[bytes, ...], tuple[AnyVideo, ...], tuple[bytes, ...]]:
    return row.images, row.videos, row.audio


def _most_frequent(counts: "Counter[str]") -> str:
    """Return the most frequent answer, the alphabetically first one in case of a tie."""
    return min(counts, key=lambda answer: (-counts[answer], answer))
