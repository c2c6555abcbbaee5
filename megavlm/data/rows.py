"""Questions about images and videos: rows of Parquet, JSONL and CSV files, read when they are
asked for.
"""

import hashlib
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, overload

from megavlm.data.chat import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, Message, read_chat
from megavlm.data.files import DataFile, expand
from megavlm.data.references import Place, image_bytes, is_url
from megavlm.data.tables import Block, open_table

CACHE_BYTES = 2**28  # of blocks that a process keeps; larger blocks are kept one at a time
NULL_MEANS = {
    "data.prompt_key": "; null asks data.question of every row",
    "data.answer_key": "; null means no answers",
    "data.image_keys": "; [] means no images",
    "data.category_key": "; null means no categories",
    "data.video_key": "; null means no videos",
}


@dataclass(frozen=True)
class Video:
    """A video as the frames that the model is to see: megavlm decodes no film and samples none."""

    frames: tuple[bytes, ...]  # images as they are stored, in order
    fps: float  # of these frames: frame i is shown at i / fps seconds


@dataclass(frozen=True)
class Row:
    """One question; its images and frames stay encoded until they are used."""

    index: int  # position in all the files read together
    problem: str  # with one IMAGE_PLACEHOLDER per image, or none at all; a chat's last user text
    answer: str  # "" where there is none
    images: tuple[bytes, ...]  # files as they are stored: PNG, JPEG, ...
    category: str  # "" where there is none
    source: str  # "file:row", for messages
    videos: tuple[Video, ...] = ()  # with one VIDEO_PLACEHOLDER per video, or none at all
    extra: Mapping[str, Any] = field(default_factory=dict)  # what rewards want besides the answer
    messages: tuple[Message, ...] = ()  # the whole chat; () where `problem` is all of it
    dataset: str = field(default="", compare=False)  # the set it is of: "geo3k/train"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is read of a record. `question` is asked of every row where `prompt` is None."""

    prompt: str | None = "problem"
    question: str | None = None
    answer: str | None = "answer"
    images: tuple[str, ...] = ("images",)
    category: str | None = "task"
    videos: str | None = None
    extra: tuple[str, ...] = ()

    def texts(self) -> list[str]:
        """Columns whose cells in a CSV file are text, whatever they look like: the region "01"."""
        names = (self.prompt, self.answer, self.category, *self.images, *self.extra)
        return [name for name in names if name is not None]

    def named(self) -> list[tuple[str, str]]:
        """(configuration key, column) of all that must be there."""
        one = (
            ("data.prompt_key", self.prompt),
            ("data.answer_key", self.answer),
            ("data.category_key", self.category),
            ("data.video_key", self.videos),
        )
        several = (("data.image_keys", self.images), ("data.extra_keys", self.extra))
        return [(key, name) for key, name in one if name is not None] + [
            (key, name) for key, names in several for name in names
        ]


def read_rows(
    files: Sequence[str],
    *,
    prompt_key: str | None = "problem",
    answer_key: str | None = "answer",
    image_keys: Sequence[str] = ("images",),
    category_key: str | None = "task",
    video_key: str | None = None,
    extra_keys: Sequence[str] = (),
    question: str | None = None,
) -> list[Row]:
    """All rows of the files in memory; see Rows."""
    columns = Columns(
        prompt=prompt_key,
        question=question,
        answer=answer_key,
        images=tuple(image_keys),
        category=category_key,
        videos=video_key,
        extra=tuple(extra_keys),
    )
    return list(Rows(files, columns))


class Rows(Sequence[Row]):
    """The rows of some files, in order. Only the blocks last used are in memory.

    The prompt column holds text or a chat (see chat.py); a chat whose last message is by the
    assistant gives the answer, if no column does. An image column holds a list of images or one,
    in any form of references.py; paths are relative to the data file and stay inside its folder.
    The video column holds a list of videos or one: a struct of `frames`, a list of images, and
    `fps`, how many of them a second has. Null or an empty list is a row without; an empty text,
    such as an empty cell of a CSV file, is an image that is missing. Columns of `extra` are kept
    as they are, and as text in CSV; an answer that is one of them may be null, "" then. In JSONL a
    key that a line lacks is null. So is NaN, which pandas writes for what is missing.

    May be used after a fork, and be pickled.
    """

    def __init__(self, files: Sequence[str], columns: Columns) -> None:
        """Files as in files.expand. Raises ValueError for a file or a column that is missing."""
        self._columns = columns
        self.files = expand(files)
        self._tables = [open_table(file, columns.texts()) for file in self.files]
        for file, table in zip(self.files, self._tables, strict=True):
            _check_columns(file, table.columns, columns)
        self.blocks = [
            (number, block)
            for number, table in enumerate(self._tables)
            for block in range(len(table.block_rows))
        ]
        self.block_rows = [n for table in self._tables for n in table.block_rows]
        self.block_bytes = [n for table in self._tables for n in table.block_bytes]
        self._starts = list(accumulate(self.block_rows, initial=0))
        sizes = [sum(table.block_rows) for table in self._tables]
        self.file_starts = list(accumulate(sizes, initial=0))
        self._cache: OrderedDict[int, Block] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Raises ValueError, naming file and row, for values of the wrong type, images that are
        not there, and placeholders that do not match the images and videos.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._row(range(len(self))[index], fetches=True)

    def peek(self, index: int) -> Row:
        """The row without images that only the network has; ValueError as for the row."""
        return self._row(index, fetches=False)

    def texts(self) -> Iterator[Row]:
        """Every row without its images and videos, which are not even read from Parquet.

        Rows whose text cannot be used are left out.
        """
        columns = self._columns
        plain = Columns(**{**vars(columns), "images": (), "videos": None})
        names = [name for _, name in plain.named()]
        for number, (file, block) in enumerate(self.blocks):
            content = self._tables[file].read(block, names)
            for offset in range(self.block_rows[number]):
                try:
                    yield self._make(content, number, offset, plain, fetches=False, checked=False)
                except ValueError:
                    continue

    def fingerprint(self) -> str:
        """Tells data sets apart by their files' content and order, wherever the files lie, and by
        the columns that are read. Images in files of their own are not looked at.
        """
        digest = hashlib.sha256(repr(self._columns).encode())
        for file in self.files:
            digest.update(file.digest().encode())
        return digest.hexdigest()

    def _row(self, index: int, *, fetches: bool) -> Row:
        number = bisect_right(self._starts, index) - 1
        offset = index - self._starts[number]
        content = self._block(number)
        return self._make(content, number, offset, self._columns, fetches=fetches, checked=True)

    def _block(self, number: int) -> Block:
        if number not in self._cache:
            file, block = self.blocks[number]
            columns = [name for _, name in self._columns.named()]
            self._cache[number] = self._tables[file].read(block, columns)
            held = sum(self.block_bytes[n] for n in self._cache)
            while held > CACHE_BYTES and len(self._cache) > 1:
                oldest, _ = self._cache.popitem(last=False)
                held -= self.block_bytes[oldest]
        self._cache.move_to_end(number)
        return self._cache[number]

    def _make(
        self,
        content: Block,
        number: int,
        offset: int,
        columns: Columns,
        *,
        fetches: bool,
        checked: bool,
    ) -> Row:
        file = self.files[self.blocks[number][0]]
        index = self._starts[number] + offset
        source = f"{file.url}:{index - self.file_starts[self.blocks[number][0]]}"
        try:
            record = {
                name: None if isinstance(value, float) and math.isnan(value) else value
                for name, value in content.record(offset).items()
            }
            maker = _RowMaker(columns, record, Place(file.folder), fetches, checked)
            return maker.row(index, source, file.dataset)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict()}


@dataclass(frozen=True)
class _RowMaker:
    """`fetches`: images of URLs, too; `checked`: placeholders against what there is."""

    columns: Columns
    record: Mapping[str, Any]
    place: Place
    fetches: bool
    checked: bool

    def row(self, index: int, source: str, dataset: str) -> Row:
        columns, record = self.columns, self.record
        messages, held = self._prompt()
        answer = self._answer()
        if len(messages) > 1 and messages[-1].role == "assistant":
            if columns.answer is not None:
                raise ValueError(
                    "the chat ends with the assistant, but answers are in "
                    f"{columns.answer!r}: set data.answer_key=null, or leave that message out"
                )
            messages, answer = messages[:-1], messages[-1].text
        found = [item for name in columns.images for item in _listed(record.get(name))]
        if found and held:
            raise ValueError(f"images both in the messages and in {', '.join(columns.images)}")
        found = found or held
        videos = () if columns.videos is None else _listed(record.get(columns.videos))
        if self.checked:
            for mark, items, name in (
                (IMAGE_PLACEHOLDER, found, ", ".join(columns.images)),
                (VIDEO_PLACEHOLDER, videos, columns.videos),
            ):
                if name or held:
                    _check_placeholders(messages, mark, len(items), columns.prompt, name)
        category = None if columns.category is None else record.get(columns.category)
        whole = len(messages) == 1 and messages[0].role == "user"
        last = next(message for message in reversed(messages) if message.role == "user")
        return Row(
            index=index,
            problem=last.text,
            answer=answer,
            images=tuple(self._image(item) for item in found if self.fetches or not is_url(item)),
            category="" if category is None else str(category),
            source=source,
            videos=tuple(self._video(item) for item in videos),
            extra={name: record.get(name) for name in columns.extra},
            messages=() if whole else messages,
            dataset=dataset,
        )

    def _answer(self) -> str:
        name = self.columns.answer
        if name is None or (name in self.columns.extra and self.record.get(name) is None):
            return ""
        return _text(self.record, name)

    def _prompt(self) -> tuple[tuple[Message, ...], list[Any]]:
        """The chat, and the images that it holds itself."""
        columns = self.columns
        if columns.prompt is None:
            assert columns.question is not None
            return (Message("user", columns.question),), []
        value = self.record.get(columns.prompt)
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            chat = read_chat(value)
            return chat.messages, list(chat.images)
        return (Message("user", _text(self.record, columns.prompt)),), []

    def _image(self, value: object) -> bytes:
        return image_bytes(value, self.place)

    def _video(self, value: object) -> Video:
        if not isinstance(value, dict) or not isinstance(value.get("frames"), list):
            raise ValueError(
                "a video must be a struct of frames (a list of images) and fps; "
                "take the frames out of the film that the model is to see"
            )
        fps = value.get("fps")
        if not isinstance(fps, int | float) or not 0 < fps < math.inf:
            raise ValueError(f"a video's fps is {fps!r}; it must be a number above 0")
        return Video(tuple(map(self._image, value["frames"])), float(fps))


def _check_columns(file: DataFile, names: Sequence[str] | None, columns: Columns) -> None:
    if columns.prompt is None and columns.question is None:
        raise ValueError("data.prompt_key=null asks nothing: set data.question=TEXT")
    for key, column in columns.named():
        if names is not None and column not in names:
            raise ValueError(
                f"{file.url}: no column {column!r} ({key}); it has {', '.join(names)}"
                + NULL_MEANS.get(key, "")
            )


def _text(record: Mapping[str, Any], column: str) -> str:
    value = record.get(column)
    if not isinstance(value, str | int | float):
        raise ValueError(f"{column!r} is {value!r:.200}; it must be text or a number")
    return str(value)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _check_placeholders(
    messages: Sequence[Message], mark: str, number: int, prompt: str | None, items: str | None
) -> None:
    placeholders = sum(message.text.count(mark) for message in messages)
    if placeholders not in (0, number):
        kind = mark.strip("<>")
        kind = "image" if kind == "image" else kind
        where = f" in {items!r}" if items else ""
        raise ValueError(
            f"{placeholders} {mark} placeholders in {prompt or 'data.question'!r} but {number} "
            f"{kind}s{where}; they must be as many, or the text must have none (what the column "
            "holds then comes first)"
        )
