"""Measures of a policy on rows with known answers."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megavlm.config.evaluation import Evaluation
from megavlm.data.rows import Row
from megavlm.evaluation.baselines import Known, exchange_images
from megavlm.evaluation.result import EvaluationResult, Measure, measure
from megavlm.inference.protocol import SamplingParams


@dataclass(frozen=True)
class Answer:
    text: str
    correct: bool
    failure: str | None = None  # kind of failure if its reward could not be computed


PlayFunction = Callable[[Sequence[Row], SamplingParams], Sequence[Answer]]


def measure_policy(
    play: PlayFunction,
    rows: Sequence[Row],
    *,
    known: Known,
    num_tokens: Callable[[Row], int],
    sampling_params: SamplingParams,
    settings: Evaluation,
    seed: int,
) -> EvaluationResult:
    """Evaluate the policy that `play` runs, with one response per row and measure.

    sampling: sampling settings of the rollout; greedy measures set its temperature to 0. known:
    facts about these rows, for the blind baseline and the valid answers. num_tokens: returns the
    length of a row's prompt. settings: selects the optional measures.
    """
    started = time.perf_counter()
    greedy = replace(sampling_params, temperature=0.0)
    categories = [row.category for row in rows]
    failures: Counter[str] = Counter()

    def answers(questions: Sequence[Row], how: SamplingParams) -> Sequence[Answer]:
        given = play(questions, how)
        failures.update(answer.failure for answer in given if answer.failure)
        return given

    def correct(questions: Sequence[Row], how: SamplingParams) -> Measure:
        return share(answers(questions, how), questions)

    def share(given: Sequence[Answer], questions: Sequence[Row]) -> Measure:
        assert len(given) == len(questions)
        return measure([answer.correct for answer in given], [row.category for row in questions])

    greedy_answers = answers(rows, greedy)
    valid = [
        answer.text in known.valid.get(row.category, ())
        for answer, row in zip(greedy_answers, rows, strict=True)
    ]
    blind = None
    if known.guesses is not None:
        # Guesses are compared as text, because a reward may require a form such as \boxed{},
        # which a bare answer does not have.
        hits = [
            (text.strip() == row.answer.strip(), row.category)
            for text, row in zip(known.guesses, rows, strict=True)
            if row.answer
        ]
        blind = measure(*map(list, zip(*hits, strict=True)))
    exchanged = _exchange(num_tokens, rows, seed) if settings.shuffled else []
    return EvaluationResult(
        greedy=share(greedy_answers, rows),
        sampled=correct(rows, sampling_params) if settings.sampled else None,
        valid=measure(valid, categories) if known.valid else None,
        blind=blind,
        shuffled=correct(exchanged, greedy) if exchanged else None,
        seconds=time.perf_counter() - started,
        failures=dict(failures),
    )


def _exchange(num_tokens: Callable[[Row], int], rows: Sequence[Row], seed: int) -> list[Row]:
    """Return rows with the images of other rows.

    A row is left out if its prompt becomes longer than all original prompts, because the processor
    or the server may refuse it.
    """
    longest = max(num_tokens(row) for row in rows)
    return [row for row in exchange_images(rows, seed) if num_tokens(row) <= longest]
