"""Evaluates what rollout servers serve on rows with known answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.evaluation.baselines import answers_by_category, blind_answers, exchange_pictures
from megavlm.evaluation.result import EvaluationResult, Measure, measure
from megavlm.rewards.base import Score
from megavlm.rollout.client import RolloutClient
from megavlm.rollout.messages import Sampling

PROMPTS_AT_ONCE = 2048  # as many pictures are in memory


def evaluate(
    client: RolloutClient,
    processor: Processor,
    rows: Sequence[Row],
    *,
    train_rows: Sequence[Row],
    reward: Callable[[str, str], Score],
    sampling: Sampling,
    sampled: bool,
    shuffled: bool,
    seed: int,
    weight_version: int | None = None,
) -> EvaluationResult:
    """One response per row and measure; `sampling` is the rollout's, greedy measures set only its
    temperature to 0. `train_rows` are what the blind baseline and the valid answers come from.

    Raises RolloutServerError where responses are not of `weight_version` (None: of any).
    """
    started = time.perf_counter()
    greedy = replace(sampling, temperature=0.0)
    categories = [row.category for row in rows]

    def answer(questions: Sequence[Row], how: Sampling) -> list[str]:
        texts = []
        for start in range(0, len(questions), PROMPTS_AT_ONCE):
            part = questions[start : start + PROMPTS_AT_ONCE]
            prompts = [processor.prompt(row) for row in part]
            groups = client.generate(prompts, n=1, sampling=how, weight_version=weight_version)
            texts += [processor.decode(response.token_ids) for (response,) in groups]
        return texts

    def correct(questions: Sequence[Row], how: Sampling) -> Measure:
        return judge(answer(questions, how), questions)

    def judge(answers: Sequence[str], questions: Sequence[Row]) -> Measure:
        pairs = zip(answers, questions, strict=True)
        hits = [reward(text, row.answer).correct for text, row in pairs]
        return measure(hits, [row.category for row in questions])

    greedy_texts = answer(rows, greedy)
    known = answers_by_category(train_rows)
    valid = [
        text in known.get(row.category, ()) for text, row in zip(greedy_texts, rows, strict=True)
    ]
    # Compared as text: a reward may ask for a form, \boxed{}, that an answer by itself lacks.
    blind = [
        text == row.answer for text, row in zip(blind_answers(train_rows, rows), rows, strict=True)
    ]
    exchanged = _exchange(processor, rows, seed) if shuffled else []
    return EvaluationResult(
        greedy=judge(greedy_texts, rows),
        sampled=correct(rows, sampling) if sampled else None,
        valid=measure(valid, categories),
        blind=measure(blind, categories),
        shuffled=correct(exchanged, greedy) if exchanged else None,
        seconds=time.perf_counter() - started,
    )


def _exchange(processor: Processor, rows: Sequence[Row], seed: int) -> list[Row]:
    """Rows with other rows' pictures, without prompts that grow longer than any of the rows' own:
    nothing says that the processor and the server take those.
    """
    longest = max(processor.num_tokens(row) for row in rows)
    return [row for row in exchange_pictures(rows, seed) if processor.num_tokens(row) <= longest]
