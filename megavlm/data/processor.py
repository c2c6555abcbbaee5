"""From a row to what the model and the rollout server get: token ids, positions, pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from megavlm.data.pictures import Picture, PictureProcessor
from megavlm.data.positions import mrope_positions
from megavlm.data.rows import IMAGE_PLACEHOLDER, Row
from megavlm.parallel.torchvision_ops import define_torchvision_operators


@dataclass(frozen=True, eq=False)
class Prompt:
    """A row as tokens, up to where the response starts."""

    row: Row
    token_ids: Tensor  # [T] int64, one image token per merged patch
    request_ids: tuple[int, ...]  # one image token per picture: what the server gets
    positions: Tensor  # [3, T] int64
    next_position: int  # M-RoPE position of the first response token
    pictures: tuple[Picture, ...]


class Processor:
    """The tokenizer, chat template and image processor of a model folder."""

    def __init__(
        self,
        folder: str | Path,
        *,
        min_pixels: int | None,
        max_pixels: int | None,
        system_prompt: str | None = None,
        max_prompt_tokens: int | None = None,
        cache_bytes: int = 2**29,
    ) -> None:
        """min_pixels, max_pixels, cache_bytes: see PictureProcessor.

        Raises ValueError for a folder that is not a Qwen-VL model, or for bounds on pixels that
        the rollout server would not keep.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise ValueError(f"model.folder: {folder} has no config.json; give a model folder")
        define_torchvision_operators()
        from transformers import AutoProcessor

        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
            image_processor = processor.image_processor
            self.image_token_id: int = config.image_token_id
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(
                f"model.folder: {folder} does not load as a Qwen-VL model with its processor "
                f"({error})"
            ) from error
        self._tokenizer = processor.tokenizer
        self._template = processor.chat_template or self._tokenizer.chat_template
        if self._template is None:
            raise ValueError(f"model.folder: {folder} has no chat template; take an Instruct model")
        self._pictures = PictureProcessor(
            image_processor, min_pixels=min_pixels, max_pixels=max_pixels, cache_bytes=cache_bytes
        )
        self._system_prompt = system_prompt
        self._max_prompt_tokens = max_prompt_tokens

        self.eos_id: int = self._tokenizer.eos_token_id
        self.vocab_size: int = config.get_text_config().vocab_size
        added = self._tokenizer.added_tokens_decoder
        special = {index for index, token in added.items() if token.special}
        unused = set(range(self.vocab_size)) - set(self._tokenizer.get_vocab().values())
        # What no answer holds: special ids but the end of a turn, and the rows that pad the
        # embedding table.
        self.suppressed_ids = tuple(sorted((special | unused) - {self.eos_id}))

    def prompt(self, row: Row) -> Prompt:
        """Tokens, positions and pictures of a row.

        Raises ValueError, naming the row, for a picture that cannot be used, for image tokens in
        the text itself, and for too long a prompt.
        """
        request_ids = self._request_ids(row)
        try:
            pictures = tuple(self._pictures.picture(image) for image in row.images)
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from error
        merge_size = self._pictures.merge_size
        ids = torch.tensor(request_ids)
        counts = torch.ones_like(ids)
        counts[ids == self.image_token_id] = torch.tensor(
            [len(picture.patches) // merge_size**2 for picture in pictures], dtype=torch.long
        )
        token_ids = ids.repeat_interleave(counts)
        if self._max_prompt_tokens is not None and len(token_ids) > self._max_prompt_tokens:
            raise ValueError(
                f"{row.source}: the prompt has {len(token_ids)} tokens, more than "
                f"data.max_prompt_tokens={self._max_prompt_tokens}; raise that or lower "
                "data.max_pixels"
            )
        positions, next_position = mrope_positions(
            token_ids,
            [picture.grid for picture in pictures],
            image_token_id=self.image_token_id,
            merge_size=merge_size,
        )
        return Prompt(row, token_ids, tuple(request_ids), positions, next_position, pictures)

    def num_tokens(self, row: Row) -> int:
        """Length of the row's prompt, without decoding its pictures; max_prompt_tokens or not.

        Raises ValueError, naming the row, for a picture whose header cannot be read.
        """
        try:
            image_tokens = sum(self._pictures.num_tokens(image) for image in row.images)
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from error
        return len(self._request_ids(row)) - len(row.images) + image_tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens and outer white space."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True).strip()

    def encode_answer(self, text: str) -> list[int]:
        """The tokens of a whole response: the text and the end of the turn."""
        return [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self.eos_id]

    def _request_ids(self, row: Row) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            _messages(row, self._system_prompt),
            chat_template=self._template,
            add_generation_prompt=True,
            tokenize=False,
        )
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids.count(self.image_token_id) != len(row.images):
            raise ValueError(
                f"{row.source}: the text holds the model's own image token; remove it "
                f"(a picture's place is marked by {IMAGE_PLACEHOLDER})"
            )
        return ids


def _messages(row: Row, system_prompt: str | None) -> list[dict[str, object]]:
    problem = row.problem
    if IMAGE_PLACEHOLDER not in problem:
        problem = IMAGE_PLACEHOLDER * len(row.images) + problem
    content: list[dict[str, str]] = []
    for number, text in enumerate(problem.split(IMAGE_PLACEHOLDER)):
        if number > 0:
            content.append({"type": "image"})
        if text:
            content.append({"type": "text", "text": text})
    user: dict[str, object] = {"role": "user", "content": content}
    if system_prompt is None:
        return [user]
    return [{"role": "system", "content": system_prompt}, user]
