"""evaluation.html: tables, sections of tasks, and questions with their images, responses and
rewards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megavlm.data.media.video_sources import pictures
from megavlm.data.rows import Row
from megavlm.evaluation.attempts import Attempt, Candidate, Question, Turn
from megavlm.evaluation.statistics import Estimate, PairedTest
from megavlm.evaluation.tables import MeasureTable, ModelComparison
from megavlm.observability.page import EmbeddedImage, embed, render
from megavlm.observability.text import failed_rewards, number, percent, points, short_names
from megavlm.writing import write_whole

# Limits on the size of the page. The template has the limits on texts.
MAX_QUESTIONS = 80
MAX_ATTEMPTS = 4

# Returns HTML (markupsafe.Markup; other text is escaped) that a task shows of candidates and names.
TaskSection = Callable[[Sequence[Candidate], Sequence[str]], str]

_TESTS = {"mcnemar": "exact McNemar test", "sign_flip": "sign-flip test"}


def write_page(
    path: Path,
    candidates: Sequence[Candidate],
    tables: Sequence[MeasureTable],
    comparison: ModelComparison | None,
    sections: Sequence[TaskSection] = (),
) -> None:
    """Write the page of one model, or of two that are compared. tables: one for each model.
    sections: functions of the tasks.
    """
    names = short_names([candidate.name for candidate in candidates])
    questions_head, questions = _questions(candidates, names)
    page = render(
        "evaluation.html",
        title="evaluation",
        models=[(name, candidate.name) for name, candidate in zip(names, candidates, strict=True)],
        tiles=_tiles(names, tables, comparison),
        overall_head=["measure", *_columns(names)],
        overall=_overall(tables),
        count=tables[0].overall["pass@1"].count,
        tables=[
            *_parts("category", "by_category", names, tables, comparison),
            *_parts("data set", "by_dataset", names, tables, comparison),
        ],
        candidates=list(zip(names, candidates, strict=True)),
        failed_rewards=failed_rewards,
        sections=[section(candidates, names) for section in sections],
        questions_head=questions_head,
        questions=questions,
    )
    write_whole(path, page)


def _tiles(
    names: Sequence[str], tables: Sequence[MeasureTable], comparison: ModelComparison | None
) -> list[tuple[str, str]]:
    shown = [
        (percent(found.overall["pass@1"].value), f"pass@1 of {name}")
        for name, found in zip(names, tables, strict=True)
    ]
    if comparison is None:
        return shown
    test = comparison.accuracy
    low, high = test.interval
    return [
        *shown,
        (points(test.difference), f"points difference, 95 % {points(low)} to {points(high)}"),
        (number(test.p_value), f"p-value ({_TESTS[test.method]})"),
        (str(test.first_better), "questions that the first model answers better"),
        (str(test.second_better), "questions that the second model answers better"),
    ]


def _columns(names: Sequence[str], measure: str = "") -> list[str]:
    return [title for name in names for title in (f"{measure}{name}", "95 %")]


def _overall(tables: Sequence[MeasureTable]) -> list[list[str]]:
    measures = [name for name in tables[0].overall if all(name in t.overall for t in tables)]
    return [
        [measure, *(cell for found in tables for cell in _cells(measure, found.overall[measure]))]
        for measure in measures
    ]


def _parts(
    title: str,
    attribute: str,
    names: Sequence[str],
    tables: Sequence[MeasureTable],
    comparison: ModelComparison | None,
) -> Iterator[tuple[str, list[str], list[list[object]]]]:
    """Yield (title, head, rows) of the table by category or by data set, if there are any."""
    parts = [getattr(found, attribute) for found in tables]
    tests: Mapping[str, PairedTest] | None = getattr(comparison, attribute, None)
    if set(parts[0]) == {""}:
        return
    rows = []
    for key in parts[0]:
        row: list[object] = [key or "(none)", parts[0][key]["pass@1"].count]
        for part in parts:
            row += _cells("pass@1", part[key]["pass@1"]) if key in part else ["-", "-"]
        if tests is not None:
            test = tests.get(key)
            row += [points(test.difference), number(test.p_value)] if test else ["-", "-"]
        rows.append(row)
    head = [title, "questions", *_columns(names, "pass@1, ")]
    yield title, head + (["difference", "p-value"] if tests is not None else []), rows


def _cells(measure: str, found: Estimate) -> list[str]:
    low, high = found.interval
    if measure.startswith(("pass@", "mean@")):
        return [percent(found.value), f"{100 * low:.1f} to {percent(high)}"]
    return [number(found.value), f"{number(low)} to {number(high)}"]


@dataclass(frozen=True)
class ShownTurn:
    """Turn with its images embedded."""

    text: str
    message: str
    shown: Sequence[EmbeddedImage]


ShownAttempt = tuple[Attempt, list[ShownTurn], list[str]]
Shown = tuple[Row, list[EmbeddedImage], list[tuple[str, list[ShownAttempt]]]]


def _questions(candidates: Sequence[Candidate], names: Sequence[str]) -> tuple[str, list[Shown]]:
    """Return a heading and the questions to show: first those on which the models differ, the rest
    evenly spread.
    """
    by_index = [{q.row.index: q for q in candidate.questions} for candidate in candidates]
    groups = [
        [found.get(question.row.index) for found in by_index]
        for question in candidates[0].questions
    ]
    differ = [group for group in groups if len({q and q.accuracy for q in group}) > 1]
    agree = [group for group in groups if len({q and q.accuracy for q in group}) == 1]
    shown = differ[:MAX_QUESTIONS]
    if room := MAX_QUESTIONS - len(shown):
        shown += agree[:: max(len(agree) // room, 1)][:room]
    head = f"{len(shown)} of {len(groups)} questions"
    if len(candidates) > 1:
        head += f", those first on which the models differ ({len(differ)})"
    return head, [_question(group, names) for group in shown]


def _question(group: Sequence[Question | None], names: Sequence[str]) -> Shown:
    row = next(question for question in group if question is not None).row
    answers = [
        (
            name,
            [
                (attempt, _turns(attempt), _notes(attempt))
                for attempt in question.attempts[:MAX_ATTEMPTS]
            ],
        )
        for name, question in zip(names, group, strict=True)
        if question is not None
    ]
    return row, _embedded(row), answers


def _turns(attempt: Attempt) -> list[ShownTurn]:
    turns = attempt.turns or [Turn(attempt.text)]
    return [ShownTurn(turn.text, turn.message, _embedded(turn)) for turn in turns]


def _embedded(shown: Row | Turn) -> list[EmbeddedImage]:
    return [embed(picture) for picture in pictures(shown.images, shown.videos)]


def _notes(attempt: Attempt) -> list[str]:
    notes = [] if attempt.finish == "stop" else [f"({attempt.finish})"]
    if attempt.failure:
        return [*notes, f"reward failed: {attempt.failure}"]
    parts = ", ".join(f"{name} {number(value)}" for name, value in attempt.parts.items())
    return [*notes, parts] if parts else notes
