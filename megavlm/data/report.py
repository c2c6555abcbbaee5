"""data_report.html: statistics of a recipe's data, and sample rows as the model gets them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavlm.data.media.video_sources import pictures
from megavlm.data.summary import Summary
from megavlm.observability.page import embed, render
from megavlm.writing import write_whole

DATA_REPORT_FILE = "data_report.html"
NUM_BINS = 8
MAX_CATEGORIES = 30


@dataclass(frozen=True)
class Distribution:
    """Histogram of integers.

    marks: Quantiles as text.
    bins: Bins as (range, count, share).
    """

    name: str
    unit: str
    marks: str
    bins: Sequence[tuple[str, int, float]]


def write_data_report(path: Path, summaries: Mapping[str, Summary]) -> None:
    """Write the page.

    summaries: Maps the heading of a section, for example "Training data", to its summary.
    """
    splits = [_split(name, summary) for name, summary in summaries.items()]
    page = render("data_report.html", title="data", splits=splits)
    write_whole(path, page)


def _split(name: str, summary: Summary) -> dict[str, Any]:
    looked, total = summary.num_looked_at, summary.num_rows
    counts = {"data set": summary.by_dataset, "category": summary.by_category}
    numbers = {
        "rows": total,
        "usable rows of those checked": summary.num_usable,
        "unusable rows": summary.num_bad,
        "rows that are too long": summary.num_long,
        "images": len(summary.widths),
        "distinct images": len(summary.distinct_images),
        "videos": summary.num_videos,
        "clips of audio": summary.num_clips,
    }
    return {
        "name": name,
        "scope": "all rows" if looked == total else f"{looked} of {total} rows, evenly spread",
        "tiles": [(f"{value:,}", label) for label, value in numbers.items()],
        "counts": [(key, _counts(found)) for key, found in counts.items() if set(found) - {""}],
        "distributions": list(_distributions(summary)),
        "reasons": summary.reasons,
        "more_reasons": summary.num_bad + summary.num_long - len(summary.reasons),
        "samples": [
            (row, [embed(shown) for shown in pictures(row.images, row.videos)], num_tokens)
            for row, num_tokens in summary.samples
        ],
    }


def _counts(counts: Counter[str]) -> list[tuple[str, int, float]]:
    total = counts.total()
    rows = [
        (key or "(none)", count, count / total) for key, count in counts.most_common(MAX_CATEGORIES)
    ]
    if len(counts) > MAX_CATEGORIES:
        rest = total - sum(count for _, count, _ in rows)
        rows.append((f"{len(counts) - MAX_CATEGORIES} others", rest, rest / total))
    return rows


def _distributions(summary: Summary) -> Iterator[Distribution]:
    for name, unit, values in (
        ("Prompt", "tokens, images included", summary.prompt_tokens),
        ("Answer", "tokens", summary.answer_tokens),
        ("Images", "per row", summary.images_per_row),
        ("Image width", "pixels, as stored", summary.widths),
        ("Image height", "pixels, as stored", summary.heights),
        ("Image file", "KiB", [size // 1024 for size in summary.file_bytes]),
    ):
        if any(values):
            ordered = sorted(values)
            marks = " · ".join(
                f"{label} {ordered[min(int(share * len(ordered)), len(ordered) - 1)]:,}"
                for label, share in (("min", 0), ("median", 0.5), ("95 %", 0.95), ("max", 1))
            )
            yield Distribution(name, unit, marks, _bins(ordered))


def _bins(ordered: Sequence[int]) -> list[tuple[str, int, float]]:
    """Return (range, count, share) of up to NUM_BINS ranges of equal width."""
    low, high = ordered[0], ordered[-1]
    width = -(-(high - low + 1) // NUM_BINS)
    counts = Counter((value - low) // width for value in ordered)
    return [
        (
            f"{start} to {start + width - 1}" if width > 1 else str(start),
            counts[i],
            counts[i] / len(ordered),
        )
        for i, start in enumerate(range(low, high + 1, width))
    ]
