"""evaluation.html: tables, and questions with their images, each model's response and reward."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megavlm.data.images import decode
from megavlm.evaluation.attempts import Attempt, Candidate, Question
from megavlm.evaluation.map import spots, world_map
from megavlm.evaluation.statistics import Estimate, PairedTest
from megavlm.evaluation.tables import Comparison, Table
from megavlm.observability.page import image, page, table, text, tiles
from megavlm.observability.records import write_whole
from megavlm.observability.text import failed_rewards, number, percent, points

# What bounds the size of the page.
MAX_QUESTIONS = 80
MAX_ATTEMPTS = 4
MAX_RESPONSE_CHARS = 3000


def write_page(
    path: Path,
    candidates: Sequence[Candidate],
    tables: Sequence[Table],
    comparison: Comparison | None,
) -> None:
    """candidates: one model, or two that are compared; tables: of each."""
    names = [candidate.name for candidate in candidates]
    body = [
        "<h1>Evaluation</h1>",
        f'<p class="sub">{text(" against ".join(names))}</p>',
        _headline(candidates, tables, comparison),
        _overall(names, tables),
        *_parts("category", names, tables, comparison),
        *_parts("data set", names, tables, comparison),
        _skipped(candidates),
        _failures(candidates),
        world_map(spots(candidates), names),
        _questions(candidates),
    ]
    write_whole(path, page("evaluation", "".join(body)).encode())


def _headline(
    candidates: Sequence[Candidate], tables: Sequence[Table], comparison: Comparison | None
) -> str:
    shown = [
        (percent(found.overall["pass@1"].value), f"pass@1 of {candidate.name}")
        for candidate, found in zip(candidates, tables, strict=True)
    ]
    if comparison is None:
        return tiles(shown)
    test = comparison.accuracy
    low, high = test.interval
    shown += [
        (points(test.difference), f"points difference, 95 % {points(low)} to {points(high)}"),
        (number(test.p_value), f"p-value ({_method(test)})"),
        (str(test.first_better), "questions that only or more often the first gets right"),
        (str(test.second_better), "the second"),
    ]
    return tiles(shown)


def _overall(names: Sequence[str], tables: Sequence[Table]) -> str:
    measures = [name for name in tables[0].overall if all(name in t.overall for t in tables)]
    rows = [
        [measure, *(cell for found in tables for cell in _cells(measure, found.overall[measure]))]
        for measure in measures
    ]
    head = ["measure", *(title for name in names for title in (name, "95 %"))]
    count = tables[0].overall["pass@1"].count
    note = (
        f'<p class="soft">{count} questions. Intervals: '
        "Wilson's where a question is right or wrong, else a bootstrap over questions.</p>"
    )
    return "<h2>All questions</h2>" + table(head, rows) + note


def _parts(
    what: str,
    names: Sequence[str],
    tables: Sequence[Table],
    comparison: Comparison | None,
) -> Iterable[str]:
    name = "by_category" if what == "category" else "by_dataset"
    parts = [getattr(found, name) for found in tables]
    tests: Mapping[str, PairedTest] | None = getattr(comparison, name, None)
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
    head = [what, "questions", *(title for name in names for title in (f"pass@1, {name}", "95 %"))]
    if tests is not None:
        head += ["difference", "p-value"]
    yield f"<h2>By {what}</h2>" + table(head, rows)


def _cells(measure: str, found: Estimate) -> list[str]:
    low, high = found.interval
    if measure.startswith(("pass@", "mean@")):
        return [percent(found.value), f"{percent(low)} to {percent(high)}"]
    return [number(found.value), f"{number(low)} to {number(high)}"]


def _method(test: PairedTest) -> str:
    return {"mcnemar": "exact McNemar test", "sign_flip": "sign-flip test"}[test.method]


def _skipped(candidates: Sequence[Candidate]) -> str:
    parts = []
    for candidate in candidates:
        left_out = candidate.skipped
        if left_out.bad or left_out.long:
            reasons = "".join(f"<li>{text(reason, 300)}</li>" for reason in left_out.reasons)
            parts.append(
                f'<div class="card">{text(candidate.name)} was not asked {left_out.bad} questions '
                f"that cannot be used and {left_out.long} that are too long."
                f"<ul>{reasons}</ul></div>"
            )
    return "<h2>Left out</h2>" + "".join(parts) if parts else ""


def _failures(candidates: Sequence[Candidate]) -> str:
    told = [
        f'<div class="card">{text(f"{candidate.name}: {failed_rewards(candidate.failures)}")}</div>'
        for candidate in candidates
        if candidate.failures
    ]
    return "<h2>Rewards that failed</h2>" + "".join(told) if told else ""


def _questions(candidates: Sequence[Candidate]) -> str:
    others = [{q.row.index: q for q in candidate.questions} for candidate in candidates]
    asked = [[of.get(question.row.index) for of in others] for question in candidates[0].questions]
    # Where the models differ is what one wants to see; the rest spread evenly.
    differ = [group for group in asked if len({q and q.accuracy for q in group}) > 1]
    agree = [group for group in asked if len({q and q.accuracy for q in group}) == 1]
    shown = differ[:MAX_QUESTIONS]
    if room := MAX_QUESTIONS - len(shown):
        shown += agree[:: max(len(agree) // room, 1)][:room]
    names = [candidate.name for candidate in candidates]
    head = f"{len(shown)} of {len(asked)} questions"
    if len(candidates) > 1:
        head += f", first those that the models answer differently well ({len(differ)})"
    return f"<h2>{head}</h2>" + "".join(_question(group, names) for group in shown)


def _question(group: Sequence[Question | None], names: Sequence[str]) -> str:
    first = next(question for question in group if question is not None)
    row = first.row
    facts = [f"answer {row.answer}", row.category, row.dataset, row.source]
    facts += [f"{key} {value}" for key, value in row.extra.items() if value not in (None, "")]
    answers = "".join(
        f'<div class="facts">{text(name)}</div><div class="responses long">'
        + "".join(_response(attempt) for attempt in question.attempts[:MAX_ATTEMPTS])
        + "</div>"
        for name, question in zip(names, group, strict=True)
        if question is not None
    )
    return (
        f'<article class="card group"><div class="images">{"".join(map(_image, row.images))}'
        f'</div><div><div class="prompt">{text(row.problem)}</div>'
        f'<div class="facts">{" · ".join(text(fact, 300) for fact in facts if fact)}</div>'
        f"{answers}</div></article>"
    )


def _response(attempt: Attempt) -> str:
    style = "response correct" if attempt.correct else "response"
    shown = text(attempt.text, MAX_RESPONSE_CHARS) or '<em class="soft">empty</em>'
    if attempt.finish != "stop":
        shown += f' <em class="soft">({text(attempt.finish)})</em>'
    parts = ", ".join(f"{name} {number(value)}" for name, value in attempt.parts.items())
    parts = f"reward failed: {attempt.failure}" if attempt.failure else parts
    if parts:
        shown += f' <em class="soft">{text(parts)}</em>'
    return f'<div class="{style}"><span>{shown}</span><b>{number(attempt.reward)}</b></div>'


def _image(data: bytes) -> str:
    # It was decoded to be asked about.
    return image(decode(data))
