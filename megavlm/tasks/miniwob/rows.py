"""Rows of MiniWoB++: a task and a seed each. The page itself draws the problem and asks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# Pages without a time of their own, on which screenshots and actions are enough.
TASKS = """choose-date-easy click-button click-button-sequence click-checkboxes click-collapsible
    click-color click-dialog click-link click-option click-scroll-list click-shape click-tab
    click-test-2 click-widget count-shape drag-box enter-date enter-password enter-text
    find-word focus-text-2 form-sequence grid-coordinate identify-shape login-user
    navigate-tree read-table search-engine simple-arithmetic text-transform""".split()
PROMPT = "Do what the page asks, by the tool computer."


def write_rows(folder: str | Path, tasks: Sequence[str], num_train: int, num_test: int) -> None:
    """Write train.parquet and test.parquet, with so many rows, the tasks in turn. No seed of a test
    row is one of a training row.

    tasks: Names of pages, such as click-button.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, first, count in (("test", 0, num_test), ("train", num_test, num_train)):
        rows = [
            {"problem": PROMPT, "answer": "", "task": tasks[index % len(tasks)], "seed": seed}
            for index, seed in enumerate(range(first, first + count))
        ]
        pq.write_table(pa.Table.from_pylist(rows), Path(folder, f"{name}.parquet"))


def check_row(row: Mapping[str, Any], **options: Any) -> None:
    """Raise ValueError for a row without a task or a seed."""
    if not isinstance(row.get("task"), str) or type(row.get("seed")) is not int:
        raise ValueError(
            "it needs a text in its column task and a whole number in its column seed: set "
            "data.extra_keys=[task, seed]"
        )
