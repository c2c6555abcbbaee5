"""`megavlm evaluate`: evaluates one model on the test rows, or two models on the same rows."""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from megavlm.config.dump import write
from megavlm.config.import_path import import_object
from megavlm.config.schema import Config
from megavlm.data.processor import Processor
from megavlm.data.rows import Row, Rows
from megavlm.evaluation.attempts import Attempt, Candidate, Question, Turn
from megavlm.evaluation.files import write_attempts
from megavlm.evaluation.page import TaskSection, write_page
from megavlm.evaluation.questions import question_limit
from megavlm.evaluation.result import EvaluationResult
from megavlm.evaluation.runner import PROMPTS_AT_ONCE, Answer
from megavlm.evaluation.runner import evaluate as run_evaluation
from megavlm.evaluation.tables import MeasureTable, ModelComparison, compare_models, tabulate
from megavlm.families import family_of
from megavlm.inference.client import RolloutClient
from megavlm.inference.connect import connect
from megavlm.inference.protocol import Sampling
from megavlm.observability.progress import Progress
from megavlm.observability.records import finite
from megavlm.observability.text import failed_rewards, number, percent, points
from megavlm.rollout.episodes import EpisodeRunner
from megavlm.rollout.rewards import make_reward_manager, used_tasks
from megavlm.rollout.trajectory import Episode, Group
from megavlm.run.model_paths import served_folder
from megavlm.training.evaluation import EvaluationSet, sampling
from megavlm.writing import write_whole

RESULT_FILE, TABLE_FILE, PAGE_FILE = "evaluation.json", "evaluation.parquet", "evaluation.html"


def evaluate_models(config: Config, progress: Progress) -> None:
    """Evaluate the models of a recipe, and write evaluation.json, evaluation.parquet and
    evaluation.html.
    """
    write(config, config.run.dir)
    # Loaded before the evaluation, so that a page that cannot be imported does not end it.
    sections: list[TaskSection] = [
        import_object(task.evaluation_page) for task in used_tasks(config) if task.evaluation_page
    ]
    names = [config.evaluation.model, *filter(None, [config.evaluation.baseline])]
    results, candidates = [], []
    for place, name in enumerate(names):
        # Separate run directories give each server its own log.
        home = Path(config.run.dir, "baseline") if place else Path(config.run.dir)
        home.mkdir(exist_ok=True)
        own = replace(config, run=replace(config.run, dir=str(home)))
        with (
            served_folder(config, name) as folder,
            connect(own, folder, progress, needs_refit=False) as connection,
        ):
            # Each model has its own tokenizer and image processor.
            served = replace(config, model=replace(config.model, folder=str(folder)))
            shown = name or config.model.checkpoint or config.model.folder
            player = ModelPlayer(served, connection.client)
            with closing(player):
                progress.begin(f"evaluating {shown}")
                # Blind and shuffled measures are made for the first model only.
                results += [player.measures()] if place == 0 else []
                candidates.append(player.candidate(shown))
    write_files(Path(config.run.dir), results[0], candidates, sections)


class ModelPlayer:
    """A served model that answers the questions of an evaluation."""

    def __init__(self, config: Config, client: RolloutClient) -> None:
        self._config, self._client = config, client
        self._started = time.perf_counter()
        settings = config.evaluation
        limit = question_limit(settings)
        self._processor = Processor(
            config.model.folder, config.data, family_of(config.model.folder)
        )
        self._episode_runner = EpisodeRunner(
            config, self._processor, make_reward_manager(config), client.runner
        )
        limited = replace(config, evaluation=replace(settings, limit=limit))
        data = config.data
        test, train = Rows(data.test_files, data), Rows(data.train_files, data)
        self._evaluation_set = EvaluationSet.of(
            limited, self._processor, self._episode_runner, test, train
        )
        self._rows, self._skipped = self._evaluation_set.rows, self._evaluation_set.skipped
        self._greedy: dict[int, Attempt] = {}

    def measures(self) -> EvaluationResult:
        """Return the same measures as an evaluation during training. The sampled measure is
        included only if evaluation.samples=1.
        """
        config, settings = self._config, self._config.evaluation

        def play(rows: Sequence[Row], how: Sampling) -> list[Answer]:
            attempts = [attempt for (attempt,) in self._play(rows, 1, how)]
            if how.temperature == 0:
                for row, attempt in zip(rows, attempts, strict=True):
                    # Keep the first answer: in later measures the row may have other images.
                    self._greedy.setdefault(row.index, attempt)
            return [Answer(attempt.text, attempt.correct, attempt.failure) for attempt in attempts]

        return run_evaluation(
            play,
            self._rows,
            known=self._evaluation_set.known,
            num_tokens=self._processor.num_tokens,
            sampling=sampling(config, self._processor),
            settings=replace(settings, sampled=settings.sampled and settings.samples == 1),
            seed=config.run.seed,
        )

    def candidate(self, name: str) -> Candidate:
        samples, how = self._config.evaluation.samples, sampling(self._config, self._processor)
        if samples == 1 and self._greedy:
            groups = [[self._greedy[row.index]] for row in self._rows]
        else:
            how = how if samples > 1 else replace(how, temperature=0.0)
            groups = self._play(self._rows, samples, how)
        questions = [
            Question(row, tuple(attempts)) for row, attempts in zip(self._rows, groups, strict=True)
        ]
        seconds = time.perf_counter() - self._started
        return Candidate(name, samples, questions, self._skipped, seconds)

    def close(self) -> None:
        self._episode_runner.close()

    def _play(self, rows: Sequence[Row], n: int, how: Sampling) -> list[list[Attempt]]:
        generate = partial(self._client.generate, sampling=how)
        played: list[list[Attempt]] = []
        for start in range(0, len(rows), PROMPTS_AT_ONCE):
            groups = [
                Group(self._processor.prompt(row)) for row in rows[start : start + PROMPTS_AT_ONCE]
            ]
            self._episode_runner.start(groups, n)
            self._episode_runner.play(groups, generate)
            played += [
                [
                    Attempt(
                        text=episode.text,
                        reward=episode.score.reward,
                        correct=episode.score.correct,
                        num_tokens=len(episode.response.token_ids),
                        finish=episode.response.finish,
                        parts=episode.score.parts,
                        failure=episode.score.failure,
                        turns=_turns(episode),
                    )
                    for episode in group.episodes
                ]
                or [Attempt("", 0.0, False, 0, "stop")] * n  # the episode did not start
                for group in groups
            ]
        return played


def _turns(episode: Episode) -> list[Turn]:
    """Return the turns of a multi-turn episode; [] for a single turn."""
    first, *later = episode.texts
    shown = [prompt.row for prompt in episode.prompts[1:]]
    turns = [Turn(text, row.problem, row.images) for text, row in zip(later, shown, strict=True)]
    return [Turn(first), *turns] if turns else []


def write_files(
    run_dir: Path,
    result: EvaluationResult,
    candidates: Sequence[Candidate],
    sections: Sequence[TaskSection] = (),
) -> None:
    tables = [tabulate(candidate.questions) for candidate in candidates]
    comparison = None
    if len(candidates) == 2:
        comparison = compare_models(candidates[0].questions, candidates[1].questions)
    write_attempts(run_dir / TABLE_FILE, candidates)
    record = {
        **result.to_dict(),
        "models": [
            _model(candidate, found) for candidate, found in zip(candidates, tables, strict=True)
        ],
        "comparison": None if comparison is None else asdict(comparison),
        "attempts": TABLE_FILE,
        "page": PAGE_FILE,
    }
    text = json.dumps(finite(record), indent=2, ensure_ascii=False)
    write_whole(run_dir / RESULT_FILE, (text + "\n").encode())
    _print_summary(result, candidates, tables, comparison)
    # The page is last, because it runs the code of tasks.
    write_page(run_dir / PAGE_FILE, candidates, tables, comparison, sections)
    for name in (RESULT_FILE, TABLE_FILE, PAGE_FILE):
        print(f"evaluation  {run_dir / name}")


def _model(candidate: Candidate, found: MeasureTable) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "questions": len(candidate.questions),
        "samples": candidate.samples,
        "skipped": asdict(candidate.skipped),
        "failures": candidate.failures,
        "seconds": candidate.seconds,
        **asdict(found),
    }


def _print_summary(
    result: EvaluationResult,
    candidates: Sequence[Candidate],
    tables: Sequence[MeasureTable],
    comparison: ModelComparison | None,
) -> None:
    print(result.line())
    for candidate, found in zip(candidates, tables, strict=True):
        shares = "  ".join(
            f"{name} {percent(measure.value)} "
            f"({percent(measure.interval[0])} to {percent(measure.interval[1])})"
            for name, measure in found.overall.items()
            if name.startswith("pass@")
        )
        asked = f"{len(candidate.questions)} questions x {candidate.samples}"
        reward = number(found.overall["reward"].value)
        print(f"{candidate.name}, {asked}:  {shares}  reward {reward}")
        if candidate.failures:
            print(f"{candidate.name}: {failed_rewards(candidate.failures)}")
    if comparison is not None:
        test = comparison.accuracy
        low, high = map(points, test.interval)
        print(
            f"difference {points(test.difference)} points (95 % {low} to {high}), "
            f"p = {number(test.p_value)} ({test.method}, {test.count} questions)"
        )
