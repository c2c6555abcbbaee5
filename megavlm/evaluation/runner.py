"""Evaluates what rollout servers serve on rows with known answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.evaluation.baselines import answers_by_category, blind_answers, exchange_pictures
from megavlm.evaluation.result import EvaluationResult, measure
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

    def correct(answers: Sequence[str]) -> list[bool]:
        return [reward(text, row.answer).correct for text, row in zip(answers, rows, strict=True)]

    greedy_texts = answer(rows, greedy)
    known = answers_by_category(train_rows)
    valid = [
        text in known.get(row.category, ()) for text, row in zip(greedy_texts, rows, strict=True)
    ]
    exchanged = exchange_pictures(rows, seed) if shuffled else []
    return EvaluationResult(
        greedy=measure(correct(greedy_texts), categories),
        sampled=measure(correct(answer(rows, sampling)), categories) if sampled else None,
        valid=measure(valid, categories),
        blind=measure(correct(blind_answers(train_rows, rows)), categories),
        shuffled=measure(correct(answer(exchanged, greedy)), categories) if shuffled else None,
        seconds=time.perf_counter() - started,
    )
