"""Questions about pictures, read from Parquet files in the form of hiyouga/geometry3k."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

IMAGE_PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class Row:
    """One question; its pictures stay encoded until they are used."""

    index: int  # position in all the files read together
    problem: str  # with one IMAGE_PLACEHOLDER per picture, or none at all
    answer: str
    images: tuple[bytes, ...]  # files as they are stored: PNG, JPEG, ...
    category: str  # "" where there is none
    source: str  # "file:row", for messages


def read_rows(
    files: Sequence[str],
    *,
    prompt_key: str = "problem",
    answer_key: str = "answer",
    image_key: str = "images",
    category_key: str | None = "task",
) -> list[Row]:
    """All rows of the files, in order.

    The image column holds a list of pictures or a single one. A picture is a struct of `bytes` and
    `path`, bytes, or a path; a path is relative to the Parquet file and stays inside its folder.
    Null or an empty list is a row of text only.

    Raises ValueError for a file or a column that is missing, and for a row whose values have the
    wrong type or whose placeholders do not match its pictures; the message names file and row.
    """
    columns = {"data.prompt_key": prompt_key, "data.answer_key": answer_key}
    columns["data.image_key"] = image_key
    if category_key is not None:
        columns["data.category_key"] = category_key
    rows: list[Row] = []
    for file in files:
        path = Path(file)
        for number, record in enumerate(_records(path, columns)):
            source = f"{path}:{number}"
            problem = _text(record[prompt_key], prompt_key, source)
            images = _images(record[image_key], path.parent, source)
            placeholders = problem.count(IMAGE_PLACEHOLDER)
            if placeholders not in (0, len(images)):
                raise ValueError(
                    f"{source}: {placeholders} {IMAGE_PLACEHOLDER} placeholders in {prompt_key!r} "
                    f"but {len(images)} pictures in {image_key!r}; they must be as many, or the "
                    "text must have none (the pictures then come first)"
                )
            category = "" if category_key is None else record[category_key]
            rows.append(
                Row(
                    index=len(rows),
                    problem=problem,
                    answer=_text(record[answer_key], answer_key, source),
                    images=images,
                    category="" if category is None else str(category),
                    source=source,
                )
            )
    return rows


def _records(path: Path, columns: dict[str, str]) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such data file; give Parquet files that exist")
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for key, column in columns.items():
                if column not in names:
                    raise ValueError(
                        f"{path}: no column {column!r} ({key}); it has {', '.join(names)}"
                        + ("; null means no categories" if key == "data.category_key" else "")
                    )
            for batch in file.iter_batches(batch_size=1024, columns=list(columns.values())):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from error


def _text(value: object, column: str, source: str) -> str:
    if not isinstance(value, str | int | float):
        raise ValueError(f"{source}: {column!r} is {value!r}; it must be text or a number")
    return str(value)


def _images(value: object, folder: Path, source: str) -> tuple[bytes, ...]:
    if value is None:
        return ()
    pictures = value if isinstance(value, list) else [value]
    return tuple(_image(picture, folder, source) for picture in pictures)


def _image(value: object, folder: Path, source: str) -> bytes:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        return _read_beside(folder, value, source)
    if not isinstance(value, bytes):
        raise ValueError(f"{source}: a picture has neither bytes nor a path")
    return value


def _read_beside(folder: Path, name: str, source: str) -> bytes:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(
            f"{source}: picture path {name!r} leaves the data file's folder; "
            "use a path inside it, or store the picture's bytes"
        )
    if not path.is_file():
        raise ValueError(f"{source}: no picture at {path}")
    return path.read_bytes()
