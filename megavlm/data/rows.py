"""Rows of Parquet, JSONL and CSV files: questions about images and videos, read on demand."""

import hashlib
import logging
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeGuard, overload

from megavlm.config.data import Data
from megavlm.data.chat.messages import (
    AUDIO_PLACEHOLDER,
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    Chat,
    Message,
    read_chat,
    read_response,
    read_tools,
    without_nulls,
)
from megavlm.data.media.audio_decoding import audio_bytes, check_audio, is_fetched_audio
from megavlm.data.media.image_decoding import decode
from megavlm.data.media.image_sources import DataFolder, is_url, media_bytes
from megavlm.data.media.video_sources import AnyVideo, check_video, is_fetched_video, read_video
from megavlm.data.tables.files import DataFile, expand
from megavlm.data.tables.formats import RecordBlock, RecordTable, cell_text, open_table

logger = logging.getLogger(__name__)

TOOLS_COLUMN, SYSTEM_COLUMN = _BESIDE_CHAT = ("tools", "system")
CACHE_BYTES = 2**28  # limit of the blocks that a process keeps; at least one block is kept
NULL_MEANS = {
    "data.prompt_key": "; null asks data.question of every row",
    "data.answer_key": "; null means no answers",
    "data.image_keys": "; [] means no images",
    "data.category_key": "; null means no categories",
    "data.video_key": "; null means no videos",
    "data.audio_key": "; null means no audio",
}


@dataclass(frozen=True)
class Row:
    """One question. Its images and videos stay encoded until they are used."""

    index: int  # position in all the files read together
    problem: str  # with one IMAGE_PLACEHOLDER per image, or none at all; a chat's last user text
    answer: str  # "" if there is none
    images: tuple[bytes, ...]  # files as they are stored: PNG, JPEG, ...
    category: str  # "" if there is none
    source: str  # for messages: "x.parquet:0" is the first row, "x.jsonl:1" the first line
    videos: tuple[AnyVideo, ...] = ()  # with one VIDEO_PLACEHOLDER per video, or none at all
    audio: tuple[bytes, ...] = ()  # files of clips, with one AUDIO_PLACEHOLDER each, or none at all
    extra: Mapping[str, Any] = field(default_factory=dict)  # columns for rewards and environments
    num_unfetched: int = 0  # number of images at URLs, which Rows.peek leaves out
    messages: tuple[Message, ...] = ()  # the whole chat; () if `problem` is all of it
    tools: tuple[Mapping[str, Any], ...] = ()  # tools that the chat's assistant may call
    response: Message | None = None  # the answer as a message of a chat; `answer` is its text
    rejected: Message | None = None  # the response that DPO rejects
    dataset: str = field(default="", compare=False)  # the data set's name: "photos/train"
    is_fetched: bool = field(default=False, compare=False)  # images or videos came from the network


class Rows(Sequence[Row]):
    """The rows of data files, in order. Only the blocks that were used last are in memory.

    `data` names the columns:

    - The prompt column holds text or a chat (see chat.py). If no column gives the answer, the last
      message of a chat does, if it is the assistant's. With a chat, a column `tools` may hold the
      tools of its assistant, and a column `system` the text of its system message.
    - The answer column may hold the assistant's message in a list; of another list the first item
      is used. If the column is also an extra column, it may be null, and the answer is "".
    - The rejected column may hold text, the assistant's message in a list, or a whole chat that
      ends with it. It may be missing: files to evaluate on need none.
    - An image column holds an image or a list of images, in any form of image_sources.py. Paths
      are relative to the data file and stay inside its folder. Null or an empty list means that
      the row has no image; an empty text, such as an empty cell of a CSV file, is an error.
    - The video column holds a video or a list of videos. A video is a file, in any form of
      image_sources.py, or a struct of `frames`, a list of images, and `fps`, the frames per second.
    - The audio column holds a clip or a list of clips. A clip is a file, in any form of
      image_sources.py, or a struct of `array`, the samples, and `sampling_rate`.
    - Extra columns are kept unchanged; in CSV they are text.

    In JSONL a key that a line lacks is null. NaN is null, too, because pandas writes it for missing
    values. A Rows object can be pickled, and used after a fork.
    """

    def __init__(self, files: Sequence[str], data: Data) -> None:
        """Find the blocks of `files`, given as paths, globs or URLs (see files.expand).

        Raises ValueError for a file or a column that is missing.
        """
        self._data = data
        self.files = expand(files)
        # In a CSV file these columns are always text: the region "01" must not become the number 1.
        texts = [*(name for _, name in _columns(data)), *_optional(data)]
        self._tables = [open_table(file, texts) for file in self.files]
        for file, table in zip(self.files, self._tables, strict=True):
            _check_columns(file, table.columns, data)
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
        self._cache: OrderedDict[int, RecordBlock] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Read a row. Raises ValueError that names the file and row for values of the wrong type,
        missing images, and placeholders that do not match the images and videos.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._row(range(len(self))[index], fetches=True)

    def peek(self, index: int) -> Row:
        """Read a row without images that would be fetched over http(s). Raises ValueError as
        indexing does.
        """
        return self._row(index, fetches=False)

    def texts(self) -> Iterator[Row]:
        """Iterate over the rows without their images and videos. Parquet files are read without
        these columns.

        Rows whose text cannot be used are left out.
        """
        plain = replace(self._data, image_keys=(), video_key=None, audio_key=None)
        for number, (file, block) in enumerate(self.blocks):
            content = self._tables[file].read(block, _present(self._tables[file], plain))
            for offset in range(self.block_rows[number]):
                try:
                    yield self._make(content, number, offset, plain, fetches=False, checked=False)
                except ValueError:
                    continue

    def fingerprint(self) -> str:
        """Return a digest of the column names and of the files' content and order. It does not
        depend on the location of the files, nor on images that are stored in separate files.
        """
        data = self._data
        columns = {  # renaming a key changes the digest, so that old checkpoints do not resume
            "prompt": data.prompt_key,
            "question": data.question,
            "answer": data.answer_key,
            "images": data.image_keys,
            "category": data.category_key,
            "videos": data.video_key,
            "extra": data.extra_keys,
        }
        if data.audio_key is not None:  # older checkpoints know of none
            columns["audio"] = data.audio_key
        if data.rejected_key is not None:  # older checkpoints know of none
            columns["rejected"] = data.rejected_key
        named = ", ".join(f"{name}={value!r}" for name, value in columns.items())
        digest = hashlib.sha256(f"Columns({named})".encode())
        for file in self.files:
            digest.update(file.digest().encode())
        return digest.hexdigest()

    def _row(self, index: int, *, fetches: bool) -> Row:
        number = bisect_right(self._starts, index) - 1
        offset = index - self._starts[number]
        content = self._block(number)
        return self._make(content, number, offset, self._data, fetches=fetches, checked=True)

    def _block(self, number: int) -> RecordBlock:
        if number not in self._cache:
            file, block = self.blocks[number]
            columns = _present(self._tables[file], self._data, _BESIDE_CHAT)
            self._cache[number] = self._tables[file].read(block, columns)
            held = sum(self.block_bytes[n] for n in self._cache)
            while held > CACHE_BYTES and len(self._cache) > 1:
                oldest, _ = self._cache.popitem(last=False)
                held -= self.block_bytes[oldest]
        self._cache.move_to_end(number)
        return self._cache[number]

    def _make(
        self,
        content: RecordBlock,
        number: int,
        offset: int,
        data: Data,
        *,
        fetches: bool,
        checked: bool,
    ) -> Row:
        file = self.files[self.blocks[number][0]]
        index = self._starts[number] + offset
        if (place := content.line(offset)) is None:
            place = index - self.file_starts[self.blocks[number][0]]
        source = f"{file.url}:{place}"
        try:
            record = {
                name: None if isinstance(value, float) and math.isnan(value) else value
                for name, value in content.record(offset).items()
            }
            for name in (data.prompt_key, data.answer_key, data.rejected_key, TOOLS_COLUMN):
                if name in record and content.fills_nulls:
                    record[name] = without_nulls(record[name])
            maker = _RowMaker(data, record, DataFolder(file.folder), fetches, checked)
            return maker.row(index, source, file.dataset)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict()}


@dataclass(frozen=True)
class _RowMaker:
    """Converts a record to a row."""

    data: Data
    record: Mapping[str, Any]
    folder: DataFolder
    fetches: bool  # whether images at http(s) URLs are fetched
    checked: bool  # whether the number of placeholders is checked

    def row(self, index: int, source: str, dataset: str) -> Row:
        data, record = self.data, self.record
        chat = self._chat()
        messages, response = chat.messages, self._message(data.answer_key, chat)
        answer = self._answer() if response is None else response.text
        if len(messages) > 1 and messages[-1].role == "assistant":
            messages, response = messages[:-1], messages[-1]
            answer = self._response(response)
        rejected = self._message(data.rejected_key, replace(chat, messages=messages))
        if rejected is None and (text := record.get(str(data.rejected_key))) is not None:
            rejected = Message("assistant", _text(text, str(data.rejected_key)))
        found = [(name, item) for name in data.image_keys for item in _listed(record.get(name))]
        videos = () if data.video_key is None else _listed(record.get(data.video_key))
        clips = () if data.audio_key is None else _listed(record.get(data.audio_key))
        for kind, columns, items, held in (
            ("image", ", ".join(data.image_keys), found, chat.images),
            ("video", data.video_key, videos, chat.videos),
            ("audio", data.audio_key, clips, chat.audio),
        ):
            if items and held:
                several = kind if kind == "audio" else f"{kind}s"
                raise ValueError(f"{several} both in the messages and in {columns}")
            if chat.num_bare.get(kind) and not columns and self.checked:
                key = "data.image_keys=[]" if kind == "image" else f"data.{kind}_key=null"
                raise ValueError(
                    f"the messages have a part of type {kind} without its {kind}, but {key} names "
                    f"no column of it: set it, or give the part its {kind}"
                )
        found = found or [(str(data.prompt_key), item) for item in chat.images]
        videos, clips = videos or chat.videos, clips or chat.audio
        if self.checked:
            for mark, items, name, held in (
                (IMAGE_PLACEHOLDER, found, ", ".join(data.image_keys), chat.images),
                (VIDEO_PLACEHOLDER, videos, data.video_key, chat.videos),
                (AUDIO_PLACEHOLDER, clips, data.audio_key, chat.audio),
            ):
                if name or held:
                    _check_placeholders(messages, mark, len(items), data.prompt_key, name)
        images = [self._image(column, item) for column, item in found]
        category = None if data.category_key is None else record.get(data.category_key)
        whole = len(messages) == 1 and messages[0] == Message("user", messages[0].text)
        last = next(message for message in reversed(messages) if message.role == "user")
        return Row(
            index=index,
            problem=last.text,
            answer=answer,
            images=tuple(image for image in images if image is not None),
            category=_category(category, data),
            source=source,
            videos=tuple(self._video(data.video_key, item) for item in videos),
            audio=tuple(self._clip(data.audio_key, item) for item in clips),
            extra={name: record.get(name) for name in data.extra_keys},
            num_unfetched=images.count(None),
            messages=() if whole else messages,
            tools=self._tools(),
            response=response,
            rejected=rejected,
            dataset=dataset,
            is_fetched=self.fetches
            and (
                any(is_url(item) for _, item in found)
                or any(map(is_fetched_video, videos))
                or any(map(is_fetched_audio, clips))
            ),
        )

    def _answer(self) -> str:
        name = self.data.answer_key
        if name is None or (name in self.data.extra_keys and self.record.get(name) is None):
            return ""
        value = self.record.get(name)
        return _text(value[0] if isinstance(value, list) and value else value, name)

    def _message(self, column: str | None, prompt: Chat) -> Message | None:
        """Return the response in a column of messages, or None if the column has none."""
        value = None if column is None else self.record.get(column)
        if not _is_chat(value):
            return None
        try:
            return read_response(value, prompt)
        except ValueError as error:
            raise ValueError(f"column {column!r}: {error}") from error

    def _response(self, message: Message) -> str:
        """Return the answer given by the last message of a chat."""
        if self.data.answer_key is not None:
            raise ValueError(
                "the chat ends with the assistant, but answers are in "
                f"{self.data.answer_key!r}: set data.answer_key=null, or leave that message out"
            )
        if not message.is_trained:
            raise ValueError(
                "the last message of the chat is the answer, but its weight is 0: leave it out"
            )
        return message.text

    def _chat(self) -> Chat:
        column, question = self.data.prompt_key, self.data.question
        if column is None:
            assert question is not None
            return Chat((Message("user", question),))
        value = self.record.get(column)
        if not _is_chat(value):
            return Chat((Message("user", _text(value, column)),))
        chat = read_chat(value)
        system = self.record.get(SYSTEM_COLUMN)
        if not isinstance(system, str) or not system:
            return chat
        if chat.messages[0].role == "system":
            if chat.messages[0].text.strip() != system.strip():
                raise ValueError(
                    f"the chat begins with a system message, but the column {SYSTEM_COLUMN!r} has "
                    f"another ({system!r:.60}): leave one out"
                )
            return chat
        return replace(chat, messages=(Message("system", system), *chat.messages))

    def _tools(self) -> tuple[Mapping[str, Any], ...]:
        column = self.data.prompt_key
        has_chat = column is not None and _is_chat(self.record.get(column))
        return read_tools(self.record.get(TOOLS_COLUMN)) if has_chat else ()

    def _image(self, column: str, value: object) -> bytes | None:
        """Return an encoded image, or None for an image that is not fetched. Errors name the
        column.
        """
        try:
            return None if not self.fetches and is_url(value) else media_bytes(value, self.folder)
        except ValueError as error:
            raise ValueError(f"column {column!r}: {error}") from error

    def _clip(self, column: str | None, value: object) -> bytes:
        """Return an encoded clip. Errors name the column."""
        try:
            return audio_bytes(value, self.folder)
        except ValueError as error:
            raise ValueError(f"column {column or self.data.prompt_key!r}: {error}") from error

    def _video(self, column: str | None, value: object) -> AnyVideo:
        """Return an encoded video. Errors name the column."""
        try:
            return read_video(value, self.folder)
        except ValueError as error:
            raise ValueError(f"column {column or self.data.prompt_key!r}: {error}") from error


def check_media(row: Row) -> None:
    """Raise ValueError that names the row for an image or a frame of a video that cannot be
    decoded. Of a video file only the first frame is decoded.
    """
    parts: list[tuple[str, Callable[[Any], object], Any]] = [
        *((f"image {i}", decode, image) for i, image in enumerate(row.images, 1)),
        *((f"video {i}", check_video, video) for i, video in enumerate(row.videos, 1)),
        *((f"audio {i}", check_audio, clip) for i, clip in enumerate(row.audio, 1)),
    ]
    for name, check, part in parts:
        try:
            check(part)
        except ValueError as error:
            raise ValueError(f"{row.source}: {name}: {error}") from error


def rejected_row(row: Row) -> Row:
    """Return a row whose answer is the rejected response. Raises ValueError if it has none, or if
    that is the chosen one in the same words.
    """
    if row.rejected is None:
        raise ValueError(
            f"{row.source}: algorithm.name=dpo needs a response to reject, but this row has none: "
            "name its column in data.rejected_key, or leave the row out"
        )
    if row.rejected == (row.response or Message("assistant", row.answer)):
        raise same_responses(row)
    return replace(row, answer=row.rejected.text, response=row.rejected)


def same_responses(row: Row) -> ValueError:
    return ValueError(
        f"{row.source}: the chosen and the rejected response are the same tokens; leave the row out"
    )


def _columns(data: Data) -> list[tuple[str, str]]:
    """Return (configuration key, column) of every column that files must have."""
    keys = (
        "prompt_key",
        "answer_key",
        "category_key",
        "video_key",
        "audio_key",
        "image_keys",
        "extra_keys",
    )
    columns = []
    for key in keys:
        if key == "category_key" and data.category_key == Data.category_key:
            continue
        value: str | tuple[str, ...] | None = getattr(data, key)
        names = (value,) if isinstance(value, str) else value or ()
        columns += [(f"data.{key}", name) for name in names]
    return columns


def _optional(data: Data) -> list[str]:
    """Return the columns that files need not have: the rejected responses, which an evaluation does
    not read, and the categories if data.category_key is the default.
    """
    category = data.category_key if data.category_key == Data.category_key else None
    return [*filter(None, [data.rejected_key, category])]


def _present(table: RecordTable, data: Data, further: Sequence[str] = ()) -> list[str]:
    """Return the columns to read: all required ones, and the optional ones that the table has."""
    may_have = [name for name in (*further, *_optional(data)) if name in (table.columns or ())]
    return list(dict.fromkeys([*(name for _, name in _columns(data)), *may_have]))


def _check_columns(file: DataFile, names: Sequence[str] | None, data: Data) -> None:
    if data.prompt_key is None and data.question is None:
        raise ValueError("data.prompt_key=null asks nothing: set data.question=TEXT")
    for key, column in _columns(data):
        if names is not None and names.count(column) > 1:
            logger.warning(
                "%s: %r is the name of several columns: the last is read", file.url, column
            )
        if names is not None and column not in names:
            raise ValueError(
                f"{file.url}: no column {column!r} ({key}); it has {', '.join(names)}"
                + NULL_MEANS.get(key, "")
            )


def _is_chat(value: object) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(x, Mapping) for x in value)


def _category(value: object, data: Data) -> str:
    if isinstance(value, bytes):
        raise ValueError(f"{data.category_key!r} is {value!r:.200}; it must be text or a number")
    return "" if value is None else cell_text(value)


def _text(value: object, column: str) -> str:
    if isinstance(value, list | Mapping | bytes) or value is None:
        raise ValueError(f"{column!r} is {value!r:.200}; it must be text or a number")
    return cell_text(value)


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
        where = f" in {items!r}" if items else ""
        raise ValueError(
            f"{placeholders} {mark} placeholders in {prompt or 'data.question'!r} but {number} "
            f"{kind}s{where}; they must be as many, or the text must have none (what the column "
            "holds then comes first)"
        )
