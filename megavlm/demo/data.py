"""The demo's data: images or videos that it draws, or Parquet files like hiyouga/geometry3k."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megavlm.config.data import Data
from megavlm.data.chat.messages import IMAGE_PLACEHOLDER, without_placeholders
from megavlm.data.rows import Rows
from megavlm.demo.shapes import ROW_SCHEMA, write_dataset

NUM_TRAIN, NUM_TEST = 8000, 800
CATEGORY = "task"
CAPTION = IMAGE_PLACEHOLDER + "Describe the image."


ParquetRow = dict[str, Any]  # a line of a Parquet file


@dataclass(frozen=True)
class DemoData:
    """Files for each purpose, and the column with categories, if there is one."""

    train: Path
    test: Path
    warm_start: Path
    category_key: str | None

    def rows(self) -> Rows:
        """Return all rows on which the tokenizer is trained."""
        files = [str(self.warm_start), str(self.train)]
        return Rows(files, Data(category_key=self.category_key))

    def texts(self) -> Iterator[str]:
        for row in self.rows().texts():
            for text in [message.text for message in row.messages] or [row.problem]:
                yield without_placeholders(text)
            yield row.answer


def draw_data(folder: Path, *, seed: int, tasks: Sequence[str] | None = None) -> DemoData:
    """Draw images and questions. tasks: names from shapes.TASKS; None uses the default mix."""
    write_dataset(folder, seed=seed, num_train=NUM_TRAIN, num_test=NUM_TEST, tasks=tasks)
    train, test = folder / "train.parquet", folder / "test.parquet"
    return DemoData(train, test, folder / "warm_start.parquet", CATEGORY)


def take_data(source: Path, folder: Path, *, seed: int) -> DemoData:
    """Use train.parquet and test.parquet of `source`. Without test.parquet, a tenth of the training
    rows is held out.

    The warm start is as similar to the one on drawn images as the data set allows: the answers
    about an image serve as its caption, and a question with several answers gets a random one of
    them. This teaches the form of an answer, and leaves the meaning of the question to RL.
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
    warm_start = folder / "warm_start.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    rows = pq.read_table(train, columns=["images", "problem", "answer"]).to_pylist()
    captions = list(_captions(rows))
    questions = _withheld(rows, len(captions) or len(rows), np.random.default_rng([seed, 1]))
    pq.write_table(pa.Table.from_pylist(captions + questions, schema=ROW_SCHEMA), warm_start)
    return DemoData(train, test, warm_start, category_key)


def _captions(rows: Sequence[ParquetRow]) -> Iterator[ParquetRow]:
    """Yield a caption row for each image: its answers, the rarest first, without the answers to
    yes-or-no questions.
    """
    known = _answers(rows)
    by_image: dict[bytes, list[ParquetRow]] = {}
    for row in rows:
        if len(row["images"]) == 1 and len(known[row["problem"]]) != 2:
            by_image.setdefault(row["images"][0]["bytes"], []).append(row)
    counts = Counter(row["answer"] for row in rows)
    for about in by_image.values():
        answers = sorted(
            {row["answer"] for row in about}, key=lambda answer: (counts[answer], answer)
        )
        yield about[0] | {"problem": CAPTION, "answer": " ".join(answers), CATEGORY: "caption"}


def _withheld(rows: Sequence[ParquetRow], count: int, rng: np.random.Generator) -> list[ParquetRow]:
    """Return `count` of the questions, each with a random one of the answers that the same question
    has in any row.
    """
    known = {problem: sorted(answers) for problem, answers in _answers(rows).items()}
    some = [rows[index] for index in rng.permutation(len(rows))[:count]]
    return [
        row | {"answer": str(rng.choice(known[row["problem"]])), CATEGORY: "question"}
        for row in some
    ]


def _answers(rows: Sequence[ParquetRow]) -> dict[str, set[str]]:
    known: dict[str, set[str]] = {}
    for row in rows:
        known.setdefault(row["problem"], set()).add(row["answer"])
    return known


def _hold_out(table: pa.Table, folder: Path, seed: int) -> tuple[Path, Path]:
    order = np.random.default_rng(seed).permutation(table.num_rows)
    count = max(table.num_rows // 10, 1)
    folder.mkdir(parents=True, exist_ok=True)
    train, test = folder / "train.parquet", folder / "test.parquet"
    pq.write_table(table.take(np.sort(order[count:])), train)
    pq.write_table(table.take(np.sort(order[:count])), test)
    return train, test
