"""Processor that converts rows to prompts: token ids, positions and images."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedConfig

from megavlm.config.data import Data
from megavlm.data.chat.template import ChatTemplate, text_after_response
from megavlm.data.media.audio import AudioProcessor
from megavlm.data.media.image_processing import ImageCache, ImageProcessor, Medium, ProcessedImage
from megavlm.data.media.videos import ProcessedVideo, VideoProcessor
from megavlm.data.rows import Row, rejected_row, same_responses
from megavlm.families import Family
from megavlm.model_config import model_config
from megavlm.parallel.torchvision_ops import define_torchvision_operators

REMOVED_IMAGE = "[an image was here]"  # in place of an image that left the prompt


class PromptTooLong(ValueError):
    """A prompt of more than data.max_prompt_tokens, or with responses of more than
    data.pack_tokens.
    """


@dataclass(frozen=True)
class LearntTurn:
    """Tokens `start` to `end` - 1 of a prompt: an earlier turn of the assistant, including its end
    of turn.

    num_images: Number of images and videos in the prompt before the turn.
    """

    start: int
    end: int
    num_images: int


@dataclass(frozen=True, eq=False)
class Prompt:
    """A row converted to tokens, up to the start of the response."""

    row: Row
    token_ids: Tensor  # [T] int64, one vision token per feature of the tower
    short_ids: tuple[int, ...]  # the same with one vision token per image or video
    positions: Tensor  # [3, T] int64
    next_position: int  # position of the first response token
    images: tuple[
        ProcessedImage, ...
    ]  # and videos and audio (`medium`), in the order of their tokens
    image_starts: tuple[int, ...] = ()  # the first of the tokens of each image
    turns: tuple[LearntTurn, ...] = ()  # earlier turns that SFT learns in addition to the answer
    answer_ids: tuple[int, ...] = ()  # tokens of the answer that SFT learns or DPO prefers
    rejected_ids: tuple[int, ...] = ()  # tokens of the response that DPO rejects

    @property
    def num_vision_tokens(self) -> int:
        """Return the number of tokens of all images and videos."""
        return len(self.token_ids) - len(self.short_ids) + len(self.images)

    @property
    def sends_frames(self) -> bool:
        """Return True if servers are sent the frames of its images and videos with all vision
        tokens, and not the pictures of its images.
        """
        return any(image.medium != "image" or image.format.sends_frames for image in self.images)

    @property
    def request_ids(self) -> tuple[int, ...]:
        """Token ids for the rollout server. A server expands the one vision token of a picture
        itself, but never the tokens of frames.
        """
        return tuple(self.token_ids.tolist()) if self.sends_frames else self.short_ids


class Processor:
    """Tokenizer, chat template, image and video processor of a model folder."""

    def __init__(
        self, folder: str | Path, data: Data, family: Family, *, cache_bytes: int = 2**29
    ) -> None:
        """Load the processor of the model in `folder`.

        data: Gives the pixel bounds of images, and the limits of videos.
        family: The model's family (see `families.family_of`).
        cache_bytes: Limit of the pixels of recent images and videos that are kept in memory.

        Raises ValueError for a folder without the processor of such a model, and for pixel bounds
        that are wider than the rollout server's.
        """
        folder = Path(folder)
        define_torchvision_operators()
        from transformers import AutoProcessor

        try:
            config = model_config(folder)
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
            self._tokenizer = processor.tokenizer
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(
                f"model.folder: {folder} does not load as a model with its processor ({error})"
            ) from error
        cache = ImageCache(cache_bytes)
        self._images: ImageProcessor = family.images(config, processor, data, cache)
        self._videos: VideoProcessor | None = family.videos(config, processor, data, cache)
        self._positions = family.positions(config)
        self.image_token_id = self._images.token_id
        self.video_token_id: int | None = None if self._videos is None else self._videos.token_id
        self._audio: AudioProcessor | None = family.audio(config, processor, cache)
        self.audio_token_id: int | None = None if self._audio is None else self._audio.token_id
        kinds = self.image_token_id, self.video_token_id, self.audio_token_id
        self.vision_token_ids = tuple(token for token in kinds if token is not None)
        marks = ("vision_start", "vision_end", "audio_start", "audio_end")
        names = [f"{mark}_token_id" for mark in marks]
        self._vision_bounds = {getattr(config, name, None) for name in names}
        self._piece_of = lru_cache(2**16)(lambda ids: self._tokenizer.decode(list(ids)))
        template = processor.chat_template or self._tokenizer.chat_template
        if template is None:
            raise ValueError(f"model.folder: {folder} has no chat template; take an Instruct model")
        self.end_ids, self.stop_ids = self._ends(folder, config, template)
        self.eos_id = self.end_ids[0]  # of a turn without tool calls; the last is that of calls
        control = (*self.vision_token_ids, *self.stop_ids, self._tokenizer.pad_token_id)
        self.chat_template = ChatTemplate(
            self._tokenizer,
            template,
            data,
            end_ids=self.end_ids,
            control_ids=[i for i in control if i is not None],
        )
        self.merge_size = self._images.format.merge  # patches of a side that become one token
        self.token_side = self._images.format.patch * self.merge_size  # in pixels
        self.coordinates = family.coordinates
        self._max_prompt_tokens, self._pack_tokens = data.max_prompt_tokens, data.pack_tokens

        self.vocab_size: int = config.get_text_config().vocab_size
        added = self._tokenizer.added_tokens_decoder
        special = {i for i, token in added.items() if token.special and i < self.vocab_size}
        unused = set(range(self.vocab_size)) - set(self._tokenizer.get_vocab().values())
        # Tokens that are never sampled: special ids other than the ends of a turn, and unused rows
        # of the embedding table.
        self.suppressed_ids = tuple(sorted((special | unused) - {*self.end_ids}))

    def _ends(
        self, folder: Path, config: PreTrainedConfig, template: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that end a turn, and all stop tokens of the servers.

        Servers stop at the eos tokens of the tokenizer, of config.json and of
        generation_config.json. The end of a turn is trained on. It is the token that the chat
        template writes after a response, or else at the start of the next message, if that is a
        stop token: some templates mark where a message begins, and a response ends by the mark of a
        user's message, or after tool calls by the mark of a tool's. Otherwise it is the tokenizer's
        eos token.
        """
        file = folder / "generation_config.json"
        generation = json.loads(file.read_text()) if file.is_file() else {}
        holder = config if hasattr(config, "eos_token_id") else config.get_text_config()
        named = (
            self._tokenizer.eos_token_id,
            getattr(holder, "eos_token_id", None),
            generation.get("eos_token_id"),
        )
        stops: set[int] = set()
        for ids in named:
            if ids is not None:
                stops.update(ids if isinstance(ids, list) else [ids])
        ends: dict[int, None] = {}
        for role in (None, "user", "tool"):
            try:
                text = text_after_response(self._tokenizer, template, role)
            except TemplateError:  # it knows no tools
                continue
            written = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            if written and written[0] in stops:
                ends[written[0]] = None
            if role is None and ends:
                break
        return tuple(ends) or (self._tokenizer.eos_token_id,), tuple(sorted(stops))

    def prompt(self, row: Row) -> Prompt:
        """Convert a row to tokens, positions, images and videos.

        Raises ValueError that names the row for an image or a video that cannot be used, for
        control tokens in the text, and for chats that the model's template cannot render. Raises
        PromptTooLong for a prompt above data.max_prompt_tokens.
        """
        return self._checked(self._prompt(row, self._short_ids(row)))

    def supervised_prompt(self, row: Row) -> Prompt:
        """Convert a row to a prompt with the turns and the answer that SFT learns.

        Raises ValueError as `prompt` does, and for an answer that cannot follow the prompt.
        """
        text = self.chat_template.prompt(row)
        answer_ids, spans = tuple(self.answer_ids(row)), self.chat_template.turns(row).spans
        short_ids = self._ids(row, text)
        turns = self._token_spans(text, spans) if spans else ()
        prompt = self._prompt(row, short_ids, turns=turns)
        return self._checked(replace(prompt, answer_ids=answer_ids))

    def preference_prompt(self, row: Row) -> Prompt:
        """Convert a row to a prompt with the two responses that DPO compares.

        Raises ValueError as `supervised_prompt` does, and for a row that is no pair.
        """
        chosen, rejected = map(tuple, self.pair_ids(row))
        prompt = self._prompt(row, self._short_ids(row))
        return self._checked(replace(prompt, answer_ids=chosen, rejected_ids=rejected))

    def pair_ids(self, row: Row) -> tuple[list[int], list[int]]:
        """Return the tokens of the chosen and of the rejected response. Raises ValueError as
        `preference_prompt` does.
        """
        other = rejected_row(row)
        chosen, rejected = self.answer_ids(row), self.answer_ids(other)
        if chosen == rejected:  # whatever their spelling was
            raise same_responses(row)
        return chosen, rejected

    def _checked(self, prompt: Prompt) -> Prompt:
        num_tokens = len(prompt.token_ids)
        if num_tokens > self._max_prompt_tokens:
            raise PromptTooLong(self.too_long(prompt.row, num_tokens))
        # Responses that are sampled later are bounded by the recipe's own rules.
        responses = len(prompt.answer_ids) + len(prompt.rejected_ids)
        whole = num_tokens + responses
        if responses and whole > self._pack_tokens:
            raise PromptTooLong(
                f"{prompt.row.source}: the prompt and its responses have {whole} tokens, more than "
                f"data.pack_tokens={self._pack_tokens}; raise that or leave the row out"
            )
        return prompt

    def num_context_turns(self, row: Row) -> int:
        """Return the number of earlier turns of the assistant that SFT does not learn, although
        their weight is not 0, because the chat template does not render them as they are sampled.

        Raises ValueError as `prompt` does.
        """
        return self.chat_template.turns(row).num_context

    def too_long(self, row: Row, num_tokens: int) -> str:
        """Return the error message for a prompt of num_tokens, above data.max_prompt_tokens."""
        return (
            f"{row.source}: the prompt has {num_tokens} tokens, more than "
            f"data.max_prompt_tokens={self._max_prompt_tokens}; raise that or lower "
            "data.max_pixels; for videos lower data.video_max_frames or data.video_max_pixels"
        )

    def next_turn(self, prompt: Prompt, response: Sequence[int], row: Row) -> Prompt:
        """Append to a prompt a response that ended its turn, followed by the messages, images and
        videos of `row` as the next turn. Earlier tokens are not tokenized again.

        Raises ValueError as `prompt` does, but not for the length.
        """
        assert response[-1] in self.end_ids, "a truncated turn has no next one"
        end = self._tokenizer.decode([response[-1]])
        following = self._ids(row, self.chat_template.next_turn(row, end))
        short_ids = [*prompt.short_ids, *response, *following]
        return self._prompt(row, short_ids, prompt.images)

    def with_images(
        self, row: Row, short_ids: Sequence[int], images: Sequence[ProcessedImage]
    ) -> Prompt:
        """Return the prompt for the given tokens, with one vision token per image or video, and
        images and videos that are already processed.
        """
        return self._prompt(row, list(short_ids), images)

    def without_images(self, prompt: Prompt, numbers: range) -> Prompt:
        """Return a prompt with a note in place of the images of these numbers, from 0."""
        note: list[int] = self._tokenizer(REMOVED_IMAGE, add_special_tokens=False)["input_ids"]
        before = prompt.short_ids
        indices = [place for place, token in enumerate(before) if token in self.vision_token_ids]
        written = {indices[number]: note for number in numbers}
        for place in list(written):
            for beside in (place - 1, place + 1):  # the marks of an image's start and end
                if before[beside] in self._vision_bounds:
                    written[beside] = []
        ids = [new for n, token in enumerate(before) for new in written.get(n, [token])]
        kept = [image for n, image in enumerate(prompt.images) if n not in numbers]
        return self._prompt(prompt.row, ids, kept)

    def hinted(self, prompt: Prompt, hint: str) -> Prompt:
        """Append a text to the last message of a prompt, whatever its length. Raises ValueError if
        the prompt does not end as the chat template begins a response to a user.
        """
        end: list[int] = self._tokenizer(
            self.chat_template.before_response, add_special_tokens=False
        )["input_ids"]
        ids = list(prompt.short_ids)
        if ids[-len(end) :] != end:
            shown = self._tokenizer.decode(ids[-len(end) :])
            raise ValueError(
                f"{prompt.row.source}: the prompt ends by {shown!r} and not by "
                f"{self.chat_template.before_response!r}, so that it has no place for the hint of "
                "distillation.teachers: remove the hint"
            )
        text = self.chat_template.spelled_out(hint)
        added: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._prompt(prompt.row, [*ids[: -len(end)], *added, *end], prompt.images)

    def image(self, row: Row, number: int, medium: Medium) -> ProcessedImage:
        """Process one image, video or clip of a row, numbered from 0. Raises ValueError as `prompt`
        does.
        """
        try:
            if medium == "audio":
                assert self._audio is not None, "a prompt of this family has no audio"
                return self._audio.audio(row.audio[number])
            if medium == "video":
                assert self._videos is not None, "a prompt of this family has no videos"
                return self._videos.video(row.videos[number])
            return self._images.image(row.images[number])
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from error

    def _prompt(
        self,
        row: Row,
        short_ids: list[int],
        known: Sequence[ProcessedImage] = (),
        turns: Sequence[tuple[int, int]] = (),
    ) -> Prompt:
        """Build a prompt.

        known: Processed images and videos of the first vision tokens; the rest comes from the
            row.
        turns: Bounds of turns in short_ids.
        """
        encoded, videos = iter(row.images), iter(row.videos)
        audio = iter(row.audio)
        before = iter(known)
        images: list[ProcessedImage] = []
        starts: list[int] = []
        token_ids: list[int] = []
        bounds = {bound: (0, 0) for turn in turns for bound in turn}  # tokens and images before it
        try:
            for index, token in enumerate(short_ids):
                if index in bounds:
                    bounds[index] = len(token_ids), len(images)
                if token in self.vision_token_ids:
                    starts.append(len(token_ids))
                if token == self.image_token_id:
                    image = next(before, None) or self._images.image(next(encoded))
                    number = sum(shown.medium == "image" for shown in images)
                    token_ids += self._images.prompt_ids(image.num_tokens, image.shown_size, number)
                    images.append(image)
                elif self._videos is not None and token == self._videos.token_id:
                    video = next(before, None) or self._videos.video(next(videos))
                    assert isinstance(video, ProcessedVideo)
                    number = sum(shown.medium == "video" for shown in images)
                    token_ids += self._videos.prompt_ids(video.grid, video.times, number)
                    images.append(video)
                elif self._audio is not None and token == self._audio.token_id:
                    clip = next(before, None) or self._audio.audio(next(audio))
                    token_ids += self._audio.prompt_ids(clip.num_tokens)
                    images.append(clip)
                else:
                    token_ids.append(token)
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from error
        ids = torch.tensor(token_ids)
        positions, next_position = self._positions(ids, images)
        return Prompt(
            row,
            ids,
            tuple(short_ids),
            positions,
            next_position,
            tuple(images),
            tuple(starts),
            tuple(LearntTurn(bounds[a][0], bounds[b][0], bounds[a][1]) for a, b in turns),
        )

    def num_tokens(self, row: Row) -> int:
        """Return the length in tokens of the row's prompt, without decoding its images or checking
        the limit.

        Raises ValueError that names the row for an image whose header cannot be read.
        """
        short_ids = self._short_ids(row)
        try:
            vision_tokens = sum(
                self._images.prompt_length(image, number) for number, image in enumerate(row.images)
            )
            if self._videos is not None:
                vision_tokens += sum(
                    self._videos.prompt_length(video, number)
                    for number, video in enumerate(row.videos)
                )
            if self._audio is not None:
                vision_tokens += sum(map(self._audio.prompt_length, row.audio))
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from error
        num_media = len(row.images) + len(row.videos) + len(row.audio)
        return len(short_ids) - num_media + vision_tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens, its end token, and outer white space."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()  # it need not be a special token
        return self._tokenizer.decode(ids, skip_special_tokens=True).strip()

    def pieces(self, token_ids: Sequence[int]) -> list[tuple[str, int]]:
        """Return the text in pieces, special tokens included, each with its number of tokens. A
        piece has several tokens if a character is spread over them.
        """
        pieces, start = [], 0
        for end in range(1, len(token_ids) + 1):
            text = self._piece_of(tuple(token_ids[start:end]))
            if "\ufffd" not in text or end - start == 4 or end == len(token_ids):
                pieces.append((text, end - start))
                start = end
        return pieces

    def token_texts(self) -> list[str]:
        """Return the text of each token of the tokenizer, by its id."""
        return [self._tokenizer.decode([token]) for token in range(len(self._tokenizer))]

    def encode_answer(self, text: str) -> list[int]:
        """Return the tokens of a complete response: the text and the end of the turn."""
        return [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self.eos_id]

    def answer_ids(self, row: Row) -> list[int]:
        """Return the tokens of the row's answer and the end of the turn. The chat template renders
        the answer, with its tool calls and thoughts. Raises ValueError as `supervised_prompt` does.
        """
        ids = self.encode_answer(self.chat_template.answer(row))
        if row.response is not None and row.response.keys.get("tool_calls"):
            ids[-1] = self.end_ids[-1]
        return ids

    def _short_ids(self, row: Row) -> list[int]:
        return self._ids(row, self.chat_template.prompt(row))

    def _token_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, int], ...]:
        """Return the bounds of the tokens that lie within each span of characters."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = zip(*encoded["offset_mapping"], strict=True)
        return tuple((bisect_left(starts, a), bisect_right(ends, b)) for a, b in spans)

    def _ids(self, row: Row, text: str) -> list[int]:
        try:
            text.encode()  # the tokenizer raises TypeError
        except UnicodeEncodeError as error:
            raise ValueError(f"{row.source}: the text is not Unicode ({error})") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        for token, items, kind in (
            (self.image_token_id, row.images, "image"),
            (self.video_token_id, row.videos, "video"),
            (self.audio_token_id, row.audio, "audio clip"),
        ):
            if token is None and items:
                raise ValueError(
                    f"{row.source}: models of this family take no {kind}s, but the prompt has "
                    f"{len(items)}; leave them out"
                )
            shown = 0 if token is None else ids.count(token)
            if shown != len(items):
                raise ValueError(
                    f"{row.source}: the chat template shows {shown} of {len(items)} "
                    f"{kind}s; leave {kind}s out of messages whose role it shows none for"
                )
        return ids
