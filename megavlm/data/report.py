"""data_report.html: what a recipe's data holds, and ten of its rows as the model gets them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from megavlm.data.images import decode
from megavlm.data.rows import Row
from megavlm.data.summary import Summary
from megavlm.observability.page import image, page, table, text, tiles
from megavlm.observability.records import write_whole
from megavlm.observability.svg import bar
from megavlm.observability.text import percent

REPORT_FILE = "data_report.html"
NUM_BINS = 8
MAX_CATEGORIES = 30


def write_data_report(path: Path, summaries: Mapping[str, Summary]) -> None:
    """summaries: by what they are called, "Training data" say."""
    body = "<h1>Data</h1>" + "".join(_section(name, summary) for name, summary in summaries.items())
    write_whole(path, page("data", body).encode())


def _section(name: str, summary: Summary) -> str:
    looked = summary.num_looked_at
    whole = looked == summary.num_rows
    about = "all rows" if whole else f"{looked} of {summary.num_rows} rows, evenly spread"
    figures = tiles(
        [
            (f"{summary.num_rows:,}", "rows"),
            (f"{summary.num_usable:,}", "usable, of those looked at"),
            (f"{summary.num_bad:,}", "that cannot be used"),
            (f"{summary.num_long:,}", "too long"),
            (f"{len(summary.widths):,}", "images"),
            (f"{len(summary.distinct_images):,}", "distinct images"),
            (f"{summary.num_videos:,}", "videos"),
        ]
    )
    parts = [
        f"<h2>{escape(name)}</h2>",
        f'<p class="sub">Everything below is about {about}.</p>',
        figures,
        _counts("data set", summary.by_dataset),
        _counts("category", summary.by_category),
        _distribution("Prompt", "tokens, images included", summary.prompt_tokens),
        _distribution("Answer", "tokens", summary.answer_tokens),
        _distribution("Images", "per row", summary.images_per_row),
        _distribution("Image width", "pixels, as stored", summary.widths),
        _distribution("Image height", "pixels, as stored", summary.heights),
        _distribution("Image file", "KiB", [size // 1024 for size in summary.file_bytes]),
        _reasons(summary.reasons, summary.num_bad + summary.num_long),
        f"<h3>{len(summary.samples)} rows</h3>" if summary.samples else "",
        *(_sample(row, num_tokens) for row, num_tokens in summary.samples),
    ]
    return "".join(parts)


def _counts(name: str, counts: Counter[str]) -> str:
    if not counts or set(counts) == {""}:
        return ""
    total = sum(counts.values())
    rows = [
        (key or "(none)", count, percent(count / total), bar(count / total))
        for key, count in counts.most_common(MAX_CATEGORIES)
    ]
    if len(counts) > MAX_CATEGORIES:
        rest = total - sum(count for _, count in counts.most_common(MAX_CATEGORIES))
        more = f"{len(counts) - MAX_CATEGORIES} others"
        rows.append((more, rest, percent(rest / total), bar(rest / total)))
    return f"<h3>By {escape(name)}</h3>" + table((name, "rows", "share", ""), rows, raw=(3,))


def _distribution(name: str, unit: str, values: Sequence[int]) -> str:
    if not values or min(values) == max(values) == 0:
        return ""
    ordered = sorted(values)
    marks = " · ".join(
        f"{label} {ordered[min(int(share * len(ordered)), len(ordered) - 1)]:,}"
        for label, share in (("least", 0), ("median", 0.5), ("95 %", 0.95), ("most", 1))
    )
    rows = [
        (f"{low} to {high}" if high > low else str(low), count, bar(count / len(values)))
        for low, high, count in _bins(ordered)
    ]
    head = f'<h3>{escape(name)} <span class="soft">({escape(unit)}; {marks})</span></h3>'
    return head + table((unit, "count", ""), rows, raw=(2,))


def _bins(ordered: Sequence[int]) -> list[tuple[int, int, int]]:
    """(least, most, count) of up to NUM_BINS ranges of equal width."""
    low, high = ordered[0], ordered[-1]
    width = -(-(high - low + 1) // NUM_BINS)
    counts = Counter((value - low) // width for value in ordered)
    starts = range(low, high + 1, width)
    return [(start, start + width - 1, counts[i]) for i, start in enumerate(starts)]


def _reasons(reasons: Sequence[str], count: int) -> str:
    """reasons: the first of `count`."""
    if not reasons:
        return ""
    items = "".join(f"<li>{text(reason, 400)}</li>" for reason in reasons)
    if count > len(reasons):
        items += f"<li>and {count - len(reasons):,} more</li>"
    return f'<h3>Rows that cannot be used</h3><div class="card"><ul>{items}</ul></div>'


def _sample(row: Row, num_tokens: int) -> str:
    # They have been looked at: a broken one is shown as its reason.
    shown = "".join(_image(image) for image in row.images)
    messages = row.messages or ()
    prompt = "".join(f"<div>{text(f'{m.role}: {m.text}')}</div>" for m in messages)
    facts = [f"answer {row.answer}", row.category, row.dataset, row.source, f"{num_tokens} tokens"]
    facts += [f"{key} {value}" for key, value in row.extra.items() if value not in (None, "")]
    return (
        f'<article class="card group"><div class="images">{shown}</div><div>'
        f'<div class="prompt">{prompt or text(row.problem)}</div>'
        f'<div class="facts">{" · ".join(text(fact, 300) for fact in facts if fact)}</div>'
        "</div></article>"
    )


def _image(data: bytes) -> str:
    try:
        return image(decode(data))
    except ValueError as error:
        return f'<span class="soft">{text(str(error), 200)}</span>'
