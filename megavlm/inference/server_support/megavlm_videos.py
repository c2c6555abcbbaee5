"""Prompts whose frames are sent, in the first process of a server: the trainer's tokens, positions
and frames.

From a video file SGLang would sample other frames than the trainer, tokenize the prompt again and
compute positions of its own; from a picture it would cut tiles in another way. So a request has the
tokens of the prompt as the model gets them, and its only video is a text that begins with
`megavlm:` and goes on with the path of an in-memory file, or base64. This content describes all
images and videos: 8 bytes with the length of a header, the header in JSON, the positions
[3, num_tokens] int32, and the frames [F, H, W, 3] uint8 of each image and video, or the log-mel
frames [F, mel] float32 of audio. The header has the
`media` (medium, shape and hash), the `format` of patches, the prompt's `num_tokens` and
its `next_position`: tokens after it are a response that goes on.
"""

import asyncio
import base64
import json
from contextvars import ContextVar
from functools import partial
from itertools import islice, pairwise
from math import prod
from typing import Any

from sglang.srt.multimodal.processors.base_processor import (
    BaseMultimodalProcessor,
    BaseMultiModalProcessorOutput,
)

BEGIN, FILE = "megavlm:", "file://"


def install() -> None:
    """Make SGLang take a prompt's media as the trainer has processed them, with its positions: some
    of SGLang's processors would compute positions again, without the sizes of such media.
    """
    load, start = BaseMultimodalProcessor.load_mm_data, BaseMultimodalProcessor.__init__
    given_positions: ContextVar[Any] = ContextVar("given_positions")

    async def combine(
        self: Any, image_data: Any, video_data: Any, input_text: Any, **_: Any
    ) -> Any:
        from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

        media = await self.load_mm_data(
            prompt=input_text,
            image_data=image_data,
            video_data=video_data,
            multimodal_tokens=self.mm_tokens,
        )
        items, _, _ = await self.process_and_combine_mm_data_async(media, self.mm_tokens)
        return MultimodalProcessorOutput(
            input_ids=input_text,
            mm_items=items,
            im_start_id=self.img_start_token_id,
            im_end_id=self.img_end_token_id,
            im_token_id=self.img_context_token_id,
            video_token_id=self.video_token_id,
        )

    async def in_lines(
        self: Any, process: Any, input_text: Any, request_obj: Any, **given: Any
    ) -> Any:
        from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

        sent = request_obj.video_data
        if not sent or not str(sent[0]).startswith(BEGIN):
            return await process(input_text=input_text, request_obj=request_obj, **given)
        media = await self.load_mm_data(
            prompt=input_text, video_data=sent, multimodal_tokens=self.mm_tokens
        )
        items, _, _ = await self.process_and_combine_mm_data_async(media, self.mm_tokens)
        for item in items:
            lines, size = patch_lines(item.feature[0], self.image_processor.patch_size)
            item.feature, item.tgt_size, item.use_vit_merger = [lines], [size], True
        return MultimodalProcessorOutput(
            input_ids=input_text,
            mm_items=items,
            im_token_id=self.image_token_id,
            video_token_id=self.video_token_id,
        )

    def start_with_positions(self: Any, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        if hasattr(self, "_process_special_format"):
            # For prompts of tokens SGLang's processors of tiles load nothing, and give each medium
            # the places of all.
            self._process_special_format = partial(combine, self)
        process = self.process_mm_data_async
        if hasattr(self, "_splice_expansions"):
            # SGLang's processor of slices cuts pictures itself.
            process = partial(in_lines, self, process)

        async def process_with_positions(*arguments: Any, **options: Any) -> Any:
            given_positions.set(None)
            made = await process(*arguments, **options)
            if (media := given_positions.get()) is not None:
                made.mrope_positions = media["mrope_positions"]
                made.mrope_position_delta = media["mrope_position_delta"].reshape(1, 1)
            return made

        self.process_mm_data_async = process_with_positions

    async def load_processed(self: Any, prompt: Any, multimodal_tokens: Any, **given: Any) -> Any:
        for item in given.get("video_data") or []:
            if isinstance(item, str) and item.startswith(BEGIN):
                names = ("image_token_id", "video_token_id", "audio_token_id")
                token_ids = tuple(getattr(multimodal_tokens, name) for name in names)
                # In a thread, as it takes long to make patches of frames.
                text = item.removeprefix(BEGIN)
                media = await asyncio.to_thread(processed, prompt, text, token_ids)
                given_positions.set((media.images or media.videos or media.audios)[0])
                return media
        return await load(self, prompt, multimodal_tokens=multimodal_tokens, **given)

    BaseMultimodalProcessor.load_mm_data = load_processed
    BaseMultimodalProcessor.__init__ = start_with_positions


def _read(text: str) -> bytearray:
    if not text.startswith(FILE):
        return bytearray(base64.b64decode(text))
    with open(text.removeprefix(FILE), "rb") as file:
        return bytearray(file.read())


def processed(prompt: list[int], text: str, token_ids: tuple[Any, ...]) -> Any:
    """Return the media as SGLang's processors return them, one item for each run of tokens: an
    image, a video, or a frame of a video. text: Names or holds the content. token_ids: The tokens
    that images, videos and audio replace.

    Raises ValueError, which SGLang answers with HTTP 400, if the tokens are not those of the media.
    """
    # Here, because a server that takes no video (or is a test's) starts without them.
    import torch

    from megavlm.data.media.image_processing import PatchFormat

    content = _read(text)
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    length, following = header["num_tokens"], header["next_position"]
    sizes = [12 * length, *map(_num_bytes, header["media"])]
    packed, *frames = torch.frombuffer(content, dtype=torch.uint8, offset=start).split(sizes)
    positions = torch.frombuffer(bytearray(packed.numpy()), dtype=torch.int32).view(3, length)
    after = torch.arange(following, following + len(prompt) - length, dtype=torch.int32)
    shared: dict[str, Any] = {
        "format": "processor_output",
        "mrope_positions": torch.cat([positions, after.expand(3, -1)], 1).long(),
        "mrope_position_delta": torch.tensor(following - length),
    }
    format_ = PatchFormat.from_values(header["format"])
    ids = torch.tensor(prompt[:length])
    # Images and videos may share a token; then they take its places in their order.
    image, video, audio = token_ids
    if video is None or video not in prompt[:length]:
        video = image
    places = {
        token: iter((ids == token).nonzero().flatten().tolist())
        for token in token_ids
        if token is not None
    }
    images: list[dict[str, Any]] = []
    videos: list[dict[str, Any]] = []
    audios: list[dict[str, Any]] = []
    for medium, pixels in zip(header["media"], frames, strict=True):
        if medium["medium"] == "audio":
            num_frames, mel, number = medium["shape"]
            own = list(islice(places[audio], number))
            features = pixels.view(torch.float32).view(1, num_frames, mel).transpose(1, 2)
            mask = torch.ones(1, num_frames, dtype=torch.long)
            given = {"input_features": features, "feature_attention_mask": mask}
            place = {"offsets": [(own[0], own[-1])], "hash": medium["hash"]}
            audios.append({**shared, **place, **given})
            continue
        grid = format_.grid(*medium["shape"])
        shown = pixels.view(*medium["shape"], 3)
        whole = format_.sends_frames and not format_.takes_patches
        features = format_.normalised(shown) if whole else format_.cut(shown)
        is_video, number = medium["medium"] == "video", prod(grid) // format_.merge**2
        own = list(islice(places[video if is_video else image], number))
        if len(own) < number:
            raise ValueError(f"the prompt has {len(own)} of the {number} tokens of a medium")
        per_token = len(features) / number
        for index, (first, last) in enumerate(_runs(own)):
            part, features = features.tensor_split([round((last - first + 1) * per_token)])
            item = {**shared, "offsets": [(first, last)], "hash": medium["hash"] ^ index}
            if whole:  # SGLang's models of such tiles know images only
                images.append({**item, "pixel_values": part})
                continue
            # Each frame is a grid of its own, because SGLang's tower of Qwen2.5-VL would let the
            # patches of a grid attend to those of other frames, which the model never learnt.
            grids = torch.tensor([[1, *grid[1:]]]).repeat(len(part) // prod(grid[1:]), 1)
            if is_video:
                videos.append({**item, "pixel_values_videos": part, "video_grid_thw": grids})
            else:
                images.append({**item, "pixel_values": part, "image_grid_thw": grids})
    return BaseMultiModalProcessorOutput(
        input_text="", input_ids=prompt, images=images, videos=videos, audios=audios
    )


def _num_bytes(medium: dict[str, Any]) -> int:
    shape = medium["shape"]
    return 4 * shape[0] * shape[1] if medium["medium"] == "audio" else 3 * prod(shape)


def patch_lines(frame: Any, patch: int) -> tuple[Any, Any]:
    """Return the patches of a frame [3, H, W] line by line [3, P, patches * P], and the height and
    width in patches.
    """
    import torch

    height, width = (size // patch for size in frame.shape[1:])
    split = frame.view(3, height, patch, width, patch).permute(0, 2, 1, 3, 4)
    return split.reshape(3, patch, -1), torch.tensor([height, width], dtype=torch.int32)


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    """Return the first and last place of each run of consecutive places."""
    ends = [a for a, b in pairwise(indices) if b > a + 1]
    starts = [b for a, b in pairwise(indices) if b > a + 1]
    return list(zip([indices[0], *starts], [*ends, indices[-1]], strict=True))
