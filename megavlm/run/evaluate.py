"""`megavlm evaluate`: evaluates one model on the test rows, or two models on the same rows."""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megavlm.config.dump import write
from megavlm.config.schema import Config
from megavlm.data.rows import Row
from megavlm.evaluation.attempts import Attempt, Candidate, Question, Turn
from megavlm.evaluation.files import write_attempts
from megavlm.evaluation.page import TaskSection, write_page
from megavlm.evaluation.questions import question_limit
from megavlm.evaluation.result import EvaluationResult
from megavlm.evaluation.tables import MeasureTable, ModelComparison, compare_models, tabulate
from megavlm.inference.client import RolloutClient
from megavlm.inference.connect import connect
from megavlm.inference.protocol import SamplingParams
from megavlm.observability.progress import Progress
from megavlm.observability.records import finite
from megavlm.observability.text import failed_rewards, number, percent, points
from megavlm.rollout.evaluator import Evaluator
from megavlm.rollout.rewards import used_tasks
from megavlm.rollout.sampler import Sampler
from megavlm.rollout.trajectory import Episode, Group
from megavlm.run.model_paths import served_folder
from megavlm.task import import_part
from megavlm.writing import write_whole

RESULT_FILE, TABLE_FILE, PAGE_FILE = "evaluation.json", "evaluation.parquet", "evaluation.html"


def evaluate_models(config: Config, progress: Progress) -> None:
    """Evaluate the models of a recipe, and write evaluation.json, evaluation.parquet and
    evaluation.html.
    """
    write(config, config.run.dir)
    # Loaded before the evaluation, so that a page that cannot be imported does not end it.
    sections: list[TaskSection] = [
        import_part(task.evaluation_page) for task in used_tasks(config) if task.evaluation_page
    ]
    names = [config.evaluation.model, *filter(None, [config.evaluation.baseline])]
    results, candidates = [], []
    for index, name in enumerate(names):
        # Separate run directories give each server its own log.
        home = Path(config.run.dir, "baseline") if index else Path(config.run.dir)
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
                results += [player.measures()] if index == 0 else []
                candidates.append(player.candidate(shown))
    write_files(Path(config.run.dir), results[0], candidates, sections)


class ModelPlayer:
    """A served model that answers the questions of an evaluation."""

    def __init__(self, config: Config, client: RolloutClient) -> None:
        self._started = time.perf_counter()
        self._settings = settings = config.evaluation
        self._sampler = Sampler(config, client)
        # With several samples the attempts of `candidate` are the sampled measure.
        measured = replace(
            settings,
            limit=question_limit(settings),
            sampled=settings.sampled and settings.samples == 1,
        )
        self._evaluator = Evaluator(self._sampler, measured)
        self._greedy: dict[int, Attempt] = {}

    def measures(self) -> EvaluationResult:
        """Return the same measures as an evaluation during training. The sampled measure is
        included only if evaluation.samples=1.
        """

        def played(row: Row, group: Group, how: SamplingParams) -> None:
            if how.temperature == 0:
                # Keep the first answer: in later measures the row may have other images.
                self._greedy.setdefault(row.index, *_attempts(group, 1))

        return self._evaluator.run(played=played)

    def candidate(self, name: str) -> Candidate:
        samples, how = self._settings.samples, self._sampler.sampling_params
        questions = self._evaluator.questions
        if samples == 1 and self._greedy:
            groups = [[self._greedy[row.index]] for row in questions.rows]
        else:
            how = how if samples > 1 else replace(how, temperature=0.0)
            played = self._sampler.play_rows(questions.rows, samples, how)
            groups = [_attempts(group, samples) for group in played]
        asked = [
            Question(row, tuple(attempts))
            for row, attempts in zip(questions.rows, groups, strict=True)
        ]
        seconds = time.perf_counter() - self._started
        return Candidate(name, samples, asked, questions.skipped, seconds)

    def close(self) -> None:
        self._sampler.close()


def _attempts(group: Group, n: int) -> list[Attempt]:
    """Return the n attempts of a group; they are empty if its episodes did not start."""
    return [
        Attempt(
            text=episode.text,
            reward=episode.score.reward,
            correct=episode.score.correct,
            num_tokens=episode.num_tokens,
            finish=episode.responses[-1].finish,
            parts=episode.score.parts,
            failure=episode.score.failure,
            turns=_turns(episode),
        )
        for episode in group.episodes
    ] or [Attempt("", 0.0, False, 0, "stop")] * n


def _turns(episode: Episode) -> list[Turn]:
    """Return the turns of a multi-turn episode; [] for a single turn."""
    first, *later = episode.texts
    shown = [prompt.row for prompt in episode.prompts[1:]]
    turns = [
        Turn(text, row.problem, row.images, row.videos)
        for text, row in zip(later, shown, strict=True)
    ]
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
