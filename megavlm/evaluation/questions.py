"""Selection of the rows to evaluate on: an episode must be able to start from them."""

from collections.abc import Callable

from megavlm.config.data import Data
from megavlm.config.evaluation import Evaluation
from megavlm.data.processor import PromptTooLong
from megavlm.data.rows import Row, Rows
from megavlm.data.summary import MAX_REASONS
from megavlm.evaluation.attempts import SkippedRows


def question_limit(settings: Evaluation) -> int | None:
    """Return the largest number of questions, or None without a limit.

    Each question takes `samples` of the `episodes` episodes. At least one question is asked.
    """
    enough = settings.episodes and max(settings.episodes // settings.samples, 1)
    limits = [limit for limit in (settings.limit, enough) if limit is not None]
    return min(limits, default=None)


def usable(
    rows: Rows, start: Callable[[Row], None], data: Data, limit: int | None
) -> tuple[list[Row], SkippedRows]:
    """Return the first `limit` rows that an episode can start from, and the skipped ones before
    them.

    start: raises PromptTooLong or ValueError as a processor does.

    Raises ValueError for such a row where data.bad_samples or data.long_prompts is "refuse", and if
    no row is left.
    """
    if data.bad_samples == data.long_prompts == "refuse":
        return rows[:limit], SkippedRows()  # the processor raises later
    found: list[Row] = []
    bad, long, reasons = 0, 0, list[str]()
    for index in range(len(rows)):
        if len(found) == limit:
            break
        try:
            row = rows[index]
            start(row)
        except PromptTooLong as error:
            if data.long_prompts == "refuse":
                raise
            long += 1
            reasons.append(str(error))
        except ValueError as error:
            if data.bad_samples == "refuse":
                raise
            bad += 1
            reasons.append(str(error))
        else:
            found.append(row)
    if not found:
        raise ValueError(f"data.test_files: no row can be asked; the first reason: {reasons[0]}")
    return found, SkippedRows(bad, long, tuple(reasons[:MAX_REASONS]))
