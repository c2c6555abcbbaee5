"""The demo's data: pictures that it draws, or any Parquet set in the form of hiyouga/geometry3k."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megavlm.data.rows import Row, read_rows
from megavlm.demo.shapes import write_dataset

NUM_TRAIN, NUM_TEST = 8000, 800
CATEGORY = "task"


@dataclass(frozen=True)
class DemoData:
    """Files of each use, and the column with categories, if there is one."""

    train: Path
    test: Path
    warm_start: Path
    category_key: str | None

    def rows(self) -> list[Row]:
        """All that the tokenizer learns from."""
        files = [str(path) for path in dict.fromkeys([self.warm_start, self.train])]
        return read_rows(files, category_key=self.category_key)

    def texts(self) -> Iterator[str]:
        for row in self.rows():
            yield row.problem.replace("<image>", "")
            yield row.answer


def draw(folder: Path, *, seed: int) -> DemoData:
    write_dataset(folder, seed=seed, num_train=NUM_TRAIN, num_test=NUM_TEST)
    train, test = folder / "train.parquet", folder / "test.parquet"
    return DemoData(train, test, folder / "warm_start.parquet", CATEGORY)


def take(source: Path, folder: Path, *, seed: int) -> DemoData:
    """train.parquet and test.parquet of `source`; without the latter a tenth of the former is held
    out.

    The warm start is a short supervised run on the training answers themselves.
    """
    train, test = source / "train.parquet", source / "test.parquet"
    if not train.is_file():
        raise ValueError(
            f"--data {source} has no train.parquet: give a folder with train.parquet, "
            "and test.parquet if there is one"
        )
    table = pq.read_table(train)
    if not test.is_file():
        train, test = _hold_out(table, folder, seed)
    category_key = CATEGORY if CATEGORY in table.column_names else None
    return DemoData(train, test, train, category_key)


def _hold_out(table: pa.Table, folder: Path, seed: int) -> tuple[Path, Path]:
    order = np.random.default_rng(seed).permutation(table.num_rows)
    count = max(table.num_rows // 10, 1)
    folder.mkdir(parents=True, exist_ok=True)
    train, test = folder / "train.parquet", folder / "test.parquet"
    pq.write_table(table.take(np.sort(order[count:])), train)
    pq.write_table(table.take(np.sort(order[:count])), test)
    return train, test
