"""evaluation.parquet: one record for each attempt of each model."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megavlm.evaluation.attempts import Candidate

ATTEMPT_SCHEMA = pa.schema(
    [
        ("model", pa.string()),
        ("question", pa.int64()),
        ("attempt", pa.int64()),
        ("source", pa.string()),
        ("dataset", pa.string()),
        ("category", pa.string()),
        ("problem", pa.string()),
        ("answer", pa.string()),
        ("response", pa.string()),
        ("correct", pa.bool_()),
        ("reward", pa.float64()),
        ("parts", pa.string()),  # a JSON object
        ("response_tokens", pa.int64()),
        ("finish", pa.string()),
        ("failure", pa.string()),
    ]
)


def write_attempts(path: Path, candidates: Sequence[Candidate]) -> None:
    """Write the file atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    records = [record for candidate in candidates for record in _records(candidate)]
    pq.write_table(pa.Table.from_pylist(records, schema=ATTEMPT_SCHEMA), temporary)
    temporary.replace(path)


def _records(candidate: Candidate) -> Iterator[dict[str, Any]]:
    for question in candidate.questions:
        row = question.row
        for number, attempt in enumerate(question.attempts):
            yield {
                "model": candidate.name,
                "question": row.index,
                "attempt": number,
                "source": row.source,
                "dataset": row.dataset,
                "category": row.category,
                "problem": row.problem,
                "answer": row.answer,
                "response": attempt.text,
                "correct": attempt.correct,
                "reward": attempt.reward,
                "parts": json.dumps(dict(attempt.parts)),
                "response_tokens": attempt.num_tokens,
                "finish": attempt.finish,
                "failure": attempt.failure,
            }
