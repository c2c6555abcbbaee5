"""Questions about pictures and videos, from Parquet files in the form of hiyouga/geometry3k."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

IMAGE_PLACEHOLDER = "<image>"
VIDEO_PLACEHOLDER = "<video>"
NULL_MEANS = {
    "data.image_key": "; null means no pictures",
    "data.category_key": "; null means no categories",
    "data.video_key": "; null means no videos",
}


@dataclass(frozen=True)
class Video:
    """A video as the frames that the model is to see: megavlm decodes no film and samples none."""

    frames: tuple[bytes, ...]  # pictures as they are stored, in order
    fps: float  # of these frames: frame i is shown at i / fps seconds


@dataclass(frozen=True)
class Row:
    """One question; its pictures and frames stay encoded until they are used."""

    index: int  # position in all the files read together
    problem: str  # with one IMAGE_PLACEHOLDER per picture, or none at all
    answer: str
    images: tuple[bytes, ...]  # files as they are stored: PNG, JPEG, ...
    category: str  # "" where there is none
    source: str  # "file:row", for messages
    videos: tuple[Video, ...] = ()  # with one VIDEO_PLACEHOLDER per video, or none at all
    extra: Mapping[str, Any] = field(default_factory=dict)  # what rewards want besides the answer


def read_rows(
    files: Sequence[str],
    *,
    prompt_key: str = "problem",
    answer_key: str = "answer",
    image_key: str | None = "images",
    category_key: str | None = "task",
    video_key: str | None = None,
    extra_keys: Sequence[str] = (),
) -> list[Row]:
    """All rows of the files, in order.

    The image column holds a list of pictures or a single one. A picture is a struct of `bytes` and
    `path`, bytes, or a path; a path is relative to the Parquet file and stays inside its folder.
    The video column holds a list of videos or a single one. A video is a struct of `frames`, a list
    of pictures, and `fps`, how many of them a second has.
    Null or an empty list is a row without pictures, or without videos; a key that is None says
    that there is no such column. Columns of `extra_keys` are kept as they are, for rewards.

    Raises ValueError for a file or a column that is missing, and for a row whose values have the
    wrong type or whose placeholders do not match its pictures and videos; the message names file
    and row.
    """
    keys = {
        "data.prompt_key": prompt_key,
        "data.answer_key": answer_key,
        "data.image_key": image_key,
        "data.video_key": video_key,
        "data.category_key": category_key,
    }
    columns = {key: column for key, column in keys.items() if column is not None}
    rows: list[Row] = []
    for file in files:
        path = Path(file)
        for number, record in enumerate(_records(path, columns, extra_keys)):
            source = f"{path}:{number}"
            problem = _text(record[prompt_key], prompt_key, source)
            images: tuple[bytes, ...] = ()
            if image_key is not None:
                images = _images(record[image_key], path.parent, source)
                marked = f"{prompt_key!r} but {len(images)} pictures in {image_key!r}"
                _check_placeholders(problem, IMAGE_PLACEHOLDER, len(images), source, marked)
            videos: tuple[Video, ...] = ()
            if video_key is not None:
                videos = _videos(record[video_key], path.parent, source)
                marked = f"{prompt_key!r} but {len(videos)} videos in {video_key!r}"
                _check_placeholders(problem, VIDEO_PLACEHOLDER, len(videos), source, marked)
            category = "" if category_key is None else record[category_key]
            rows.append(
                Row(
                    index=len(rows),
                    problem=problem,
                    answer=_text(record[answer_key], answer_key, source),
                    images=images,
                    category="" if category is None else str(category),
                    source=source,
                    videos=videos,
                    extra={key: record[key] for key in extra_keys},
                )
            )
    return rows


def _records(
    path: Path, columns: Mapping[str, str], extra_keys: Sequence[str]
) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such data file; give Parquet files that exist")
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [*columns.items(), *(("data.extra_keys", key) for key in extra_keys)]
            for key, column in wanted:
                if column not in names:
                    raise ValueError(
                        f"{path}: no column {column!r} ({key}); it has {', '.join(names)}"
                        + NULL_MEANS.get(key, "")
                    )
            for batch in file.iter_batches(batch_size=1024, columns=[name for _, name in wanted]):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from error


def _text(value: object, column: str, source: str) -> str:
    if not isinstance(value, str | int | float):
        raise ValueError(f"{source}: {column!r} is {value!r}; it must be text or a number")
    return str(value)


def _check_placeholders(
    problem: str, placeholder: str, number: int, source: str, columns: str
) -> None:
    placeholders = problem.count(placeholder)
    if placeholders not in (0, number):
        raise ValueError(
            f"{source}: {placeholders} {placeholder} placeholders in {columns}; they must be as "
            "many, or the text must have none (the column's items then come first)"
        )


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


def _videos(value: object, folder: Path, source: str) -> tuple[Video, ...]:
    if value is None:
        return ()
    videos = value if isinstance(value, list) else [value]
    return tuple(_video(video, folder, source) for video in videos)


def _video(value: object, folder: Path, source: str) -> Video:
    if not isinstance(value, dict) or not isinstance(value.get("frames"), list):
        raise ValueError(
            f"{source}: a video must be a struct of frames (a list of pictures) and fps; "
            "take the frames out of the film that the model is to see"
        )
    fps = value.get("fps")
    if not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise ValueError(f"{source}: a video's fps is {fps!r}; it must be a number above 0")
    frames = tuple(_image(frame, folder, source) for frame in value["frames"])
    return Video(frames, float(fps))


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
