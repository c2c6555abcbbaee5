"""Rows to evaluate on: those that can be asked."""

from megavlm.config.schema import Data
from megavlm.data.processor import Processor, PromptTooLong
from megavlm.data.rows import Row, Rows
from megavlm.evaluation.attempts import Skipped

MAX_REASONS = 20


def usable(
    rows: Rows, processor: Processor, data: Data, limit: int | None
) -> tuple[list[Row], Skipped]:
    """The first `limit` rows that make a prompt, and what was left out before them.

    Raises ValueError for a row that does not, where data.bad_samples or data.long_prompts refuse
    it, and where no row is left.
    """
    if data.bad_samples == data.long_prompts == "refuse":
        return rows[:limit], Skipped()  # who makes the prompts raises
    found: list[Row] = []
    bad, long, reasons = 0, 0, list[str]()
    for index in range(len(rows)):
        if len(found) == limit:
            break
        try:
            row = rows[index]
            processor.prompt(row)
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
    return found, Skipped(bad, long, tuple(reasons[:MAX_REASONS]))
