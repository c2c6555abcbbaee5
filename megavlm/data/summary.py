"""Statistics of a data set: counts, lengths and sizes, of all or of evenly spread rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megavlm.data.media.image_decoding import image_size
from megavlm.data.processor import Processor
from megavlm.data.rows import Row, Rows, check_media

MAX_REASONS = 20


@dataclass
class Summary:
    """Statistics of a data set. Lists have one number for each checked row that can be read, or for
    each of its images. Rows that are too long are included, so that a limit can be chosen.

    num_rows: Number of all rows.
    num_looked_at: Number of checked rows; all other statistics are about these.
    """

    num_rows: int
    num_looked_at: int = 0
    num_bad: int = 0
    num_long: int = 0
    num_videos: int = 0
    num_clips: int = 0  # of audio
    reasons: list[str] = field(default_factory=list)  # the first MAX_REASONS
    by_dataset: Counter[str] = field(default_factory=Counter)
    by_category: Counter[str] = field(default_factory=Counter)
    prompt_tokens: list[int] = field(default_factory=list)
    answer_tokens: list[int] = field(default_factory=list)
    images_per_row: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)
    file_bytes: list[int] = field(default_factory=list)
    distinct_images: set[int] = field(default_factory=set)  # hashes
    samples: list[tuple[Row, int]] = field(default_factory=list)  # row, tokens of its prompt

    @property
    def num_usable(self) -> int:
        return self.num_looked_at - self.num_bad - self.num_long


def summarize(
    rows: Rows,
    processor: Processor,
    *,
    max_tokens: int,
    limit: int,
    is_supervised: bool = False,
    num_samples: int = 10,
    count: Callable[[int, int], object] = lambda done, total: None,
) -> Summary:
    """Summarize at most `limit` evenly spread rows.

    max_tokens: Limit of a prompt's length.
    is_supervised: True if answers are learnt, so that the chat template must render them.
    count: Called for progress with the number of rows done and the number of rows to check.
    """
    summary = Summary(len(rows))
    indices = evenly(len(rows), limit)
    wanted = {indices[i] for i in evenly(len(indices), num_samples)}
    for index in indices:
        count(summary.num_looked_at, len(indices))
        summary.num_looked_at += 1
        try:
            row = rows[index]
            num_tokens = processor.num_tokens(row)
            check_media(row)
            sizes = [image_size(image) for image in row.images]
            encoded = processor.answer_ids(row) if is_supervised else None
        except ValueError as error:
            summary.num_bad += 1
            _explain(summary, str(error))
            continue
        if num_tokens > max_tokens:
            summary.num_long += 1
            reason = (
                f"the prompt has {num_tokens} tokens, more than data.max_prompt_tokens={max_tokens}"
            )
            _explain(summary, f"{row.source}: {reason}")
        answer = processor.encode_answer(row.answer) if encoded is None else encoded
        _add(summary, row, num_tokens, sizes, len(answer))
        if index in wanted:
            summary.samples.append((row, num_tokens))
    return summary


def evenly(count: int, limit: int) -> list[int]:
    """Return at most `limit` evenly spread numbers of range(count), with the first and the last."""
    if count <= limit or limit == 1:
        return list(range(min(count, limit)))
    return sorted({round(i * (count - 1) / (limit - 1)) for i in range(limit)})


def _add(
    summary: Summary,
    row: Row,
    num_tokens: int,
    sizes: Sequence[tuple[int, int]],
    answer_tokens: int,
) -> None:
    summary.by_dataset[row.dataset] += 1
    summary.by_category[row.category] += 1
    summary.prompt_tokens.append(num_tokens)
    summary.answer_tokens.append(answer_tokens)
    summary.images_per_row.append(len(row.images))
    summary.num_videos += len(row.videos)
    summary.num_clips += len(row.audio)
    for image, (width, height) in zip(row.images, sizes, strict=True):
        summary.widths.append(width)
        summary.heights.append(height)
        summary.file_bytes.append(len(image))
        summary.distinct_images.add(hash(image))


def _explain(summary: Summary, reason: str) -> None:
    if len(summary.reasons) < MAX_REASONS:
        summary.reasons.append(reason)
