"""Evaluation of served weights on a recipe's test rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megavlm.config.evaluation import Evaluation
from megavlm.data.rows import Row
from megavlm.evaluation.attempts import SkippedRows
from megavlm.evaluation.baselines import Known
from megavlm.evaluation.measures import Answer, measure_policy
from megavlm.evaluation.questions import usable
from megavlm.evaluation.result import EvaluationResult
from megavlm.inference.protocol import SamplingParams
from megavlm.rollout.sampler import Refit, Sampler
from megavlm.rollout.trajectory import Group


@dataclass(frozen=True)
class Questions:
    """The rows of a recipe's evaluations, their baselines from the training rows, and the test rows
    that were skipped.
    """

    rows: Sequence[Row]
    known: Known
    skipped: SkippedRows


class Evaluator:
    def __init__(self, sampler: Sampler, settings: Evaluation) -> None:
        self._sampler, self._settings = sampler, settings

    @cached_property
    def questions(self) -> Questions:
        """The questions, read once. Raises ValueError as `usable` does, or if no row's episode can
        start.
        """
        sampler = self._sampler

        def start(row: Row) -> None:
            prompt = sampler.processor.prompt(row)
            sampler.client.run(sampler.episodes.check_start(prompt))

        rows, skipped = usable(sampler.test_rows, start, sampler.config.data, self._settings.limit)
        return Questions(rows, Known.of(sampler.rows.texts(), rows), skipped)

    def run(
        self,
        version: int | None = None,
        refit: Refit | None = None,
        played: Callable[[Row, Group, SamplingParams], object] = lambda row, group, how: None,
    ) -> EvaluationResult:
        """Play one episode for each row and measure, and return the result.

        version, refit: Weights that must answer, as in Sampler.play_rows. played: Callback for each
        played row.
        """

        def play(rows: Sequence[Row], how: SamplingParams) -> list[Answer]:
            answers = []
            for row, group in zip(
                rows, sampler.play_rows(rows, 1, how, version, refit), strict=True
            ):
                played(row, group, how)
                answers.append(_answer(group))
            return answers

        sampler, questions = self._sampler, self.questions
        return measure_policy(
            play,
            questions.rows,
            known=questions.known,
            num_tokens=sampler.processor.num_tokens,
            sampling_params=sampler.sampling_params,
            settings=self._settings,
            seed=sampler.config.run.seed,
        )


def _answer(group: Group) -> Answer:
    if not group.episodes:
        # An episode may fail to start, for example with shuffled images; it counts as incorrect.
        return Answer("", False)
    (episode,) = group.episodes
    return Answer(episode.texts[-1], episode.score.correct, episode.score.failure)
