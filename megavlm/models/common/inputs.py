"""Inputs that several families share: resized images and videos, and M-RoPE positions."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from megavlm.config.data import Data
from megavlm.data.media.image_processing import (
    ImageCache,
    ImageProcessor,
    PatchFormat,
    ProcessedImage,
)
from megavlm.data.media.videos import ProcessedVideo, VideoProcessor
from megavlm.data.packs.positions import Span, mrope_positions, plain_positions


class ResizedImages(ImageProcessor):
    """Images of any size, resized to a multiple of a token's side within bounds on their pixels."""

    def __init__(
        self,
        hf_config: Any,
        processor: Any,
        data: Data,
        cache: ImageCache,
        *,
        is_sent_processed: bool = False,
    ) -> None:
        """Set the bounds on the number of pixels of a resized image; None in `data` uses the
        folder's bound. processor: transformers' processor. is_sent_processed:
        See `format_of`.

        Raises ValueError for bounds wider than the folder's: the rollout server applies the
        folder's bounds and would resize the images again. Also raises ValueError as
        `PatchFormat.of` does.
        """
        image_processor = processor.image_processor
        format_ = format_of(image_processor, is_sent_processed=is_sent_processed)
        super().__init__(hf_config.image_token_id, format_, cache)
        smallest, largest = self.folder_bounds(image_processor)
        low = smallest if data.min_pixels is None else data.min_pixels
        high = largest if data.max_pixels is None else data.max_pixels
        if not smallest <= low <= high <= largest:
            raise ValueError(
                f"data.min_pixels={low}, data.max_pixels={high}: they must lie in this order "
                f"within {smallest} to {largest}, because the rollout server resizes to these "
                "bounds of the model folder's image processor"
            )
        self._processor, self._low, self._high = image_processor, low, high

    def folder_bounds(self, image_processor: Any) -> tuple[int, int]:
        """Return the folder's bounds on the pixels of a resized image."""
        size = image_processor.size
        return size["shortest_edge"], size["longest_edge"]

    def resized_size(self, height: int, width: int, low: int, high: int) -> tuple[int, int]:
        """Return the height and width to which transformers resizes an image for bounds on its
        pixels.
        """
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        return smart_resize(height, width, self.format.patch * self.format.merge, low, high)

    def num_patches(self, width: int, height: int) -> int:
        size = self.resized_size(height, width, self._low, self._high)
        return math.prod(self.format.grid(1, *size))

    def process(self, picture: Image.Image) -> ProcessedImage:
        """Return the resized image. Raises ValueError for an image so narrow that resizing it twice
        gives another size than resizing it once.
        """
        processor = self._processor
        values = processor.process_image(picture)
        height, width = values.shape[-2:]
        height, width = self.resized_size(height, width, self._low, self._high)
        resized = resize(processor, values, height, width)
        processed = self.processed(resized.permute(1, 2, 0)[None].contiguous())
        # Rounding to whole patches can move a narrow image out of the bounds again.
        if processor.get_number_of_image_patches(height, width, {}) != processed.num_patches:
            raise ValueError(
                f"an image of {picture.width} x {picture.height} pixels becomes {width} x "
                f"{height}, but the rollout server would resize it again; crop it"
            )
        return processed


class ResizedVideos(VideoProcessor):
    """Videos that a family shows by tokens of its own (`prompt_ids`).

    bounds_all_frames: True if the processor's pixel bounds count all frames together, as in
        Qwen3-VL, and not each frame.
    """

    bounds_all_frames: bool

    def __init__(self, hf_config: Any, processor: Any, data: Data, cache: ImageCache) -> None:
        """Wrap the Qwen2VLVideoProcessor or Qwen3VLVideoProcessor of transformers' `processor`. Its
        own pixel bounds apply, and data.video_max_pixels.
        """
        videos = processor.video_processor
        token, format_ = hf_config.video_token_id, format_of(videos)
        super().__init__(token, format_, self.max_frames(videos), data, cache)
        self._processor, self._max_pixels = videos, data.video_max_pixels
        self._folder_bounds = self.folder_bounds(processor)
        # None has the effect of False, but warns. Older transformers (5.12) have no such bound.
        self._cap = bool(getattr(videos, "cap_pixels_per_frame", False))

    def max_frames(self, processor: Any) -> int:
        """Return the largest number of frames that the folder's video processor takes of a
        video.
        """
        limit: int = processor.max_frames
        return limit

    def folder_bounds(self, processor: Any) -> tuple[int, int]:
        """Return the bounds on the pixels of a resized video. processor: transformers' processor of
        prompts.
        """
        size = processor.video_processor.size
        return size["shortest_edge"], size["longest_edge"]

    def resized_size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the size that transformers gives the frames of a video. A frame has one token at
        least.

        Raises ValueError for a transformers older than 5.19; with these versions only training on
        images is supported.
        """
        processor = self._processor
        if "temporal_factor" not in inspect.signature(processor.resize).parameters:
            raise ValueError(
                "videos need the video processors of transformers 5.19, but an older one is "
                "installed; install transformers 5.19 or leave rows with videos out"
            )
        resized: Tensor = processor.resize(
            torch.empty(1, num_frames, 3, height, width, device="meta"),
            size=self._bounds(num_frames),
            resample=processor.resample,
            factor=self.format.patch * self.format.merge,
            temporal_factor=self.format.temporal,
            cap_pixels_per_frame=self._cap,
        )
        return resized.shape[-2], resized.shape[-1]

    def resize(self, frame: Tensor, size: tuple[int, int]) -> Tensor:
        return resize(self._processor, frame, *size)

    def _bounds(self, num_frames: int) -> Any:
        """Return the bounds on the pixels of a resized video, as transformers' SizeDict."""
        from transformers.image_utils import SizeDict

        low, high = self._folder_bounds
        if self._max_pixels is not None:
            share = self._max_pixels // (1 if self.bounds_all_frames else num_frames)
            high = min(high, max(share, 1))
            low = min(low, high)
        return SizeDict(shortest_edge=low, longest_edge=high)


class MultimodalPositions:
    """M-RoPE positions of prompts."""

    def __init__(self, hf_config: Any, video_spans: Callable[[ProcessedVideo], list[Span]]) -> None:
        """Take the rules of a family. `video_spans` is a function that returns the runs of vision
        tokens in the tokens of a video.
        """
        self._vision_token_ids = hf_config.image_token_id, hf_config.video_token_id
        self._merge_size = hf_config.vision_config.spatial_merge_size
        self._video_spans = video_spans

    def __call__(self, token_ids: Tensor, images: Sequence[ProcessedImage]) -> tuple[Tensor, int]:
        """Return the positions [3, T] of token_ids [T], and the next position. images: The images
        and videos of the tokens, in order.
        """
        spans: list[Span] = []
        for image in images:
            if image.medium == "audio":
                continue  # its tokens have the positions of text
            if isinstance(image, ProcessedVideo):
                spans += self._video_spans(image)
            else:
                spans.append(Span(image.grid))
        return mrope_positions(
            token_ids, spans, vision_token_ids=self._vision_token_ids, merge_size=self._merge_size
        )


def model_inputs(
    hf_config: Any, token_ids: Tensor, positions: Tensor, images: Sequence[ProcessedImage]
) -> dict[str, Tensor]:
    """Return the inputs of transformers' model for token_ids [T] at positions [3, T], in addition
    to the tokens: patches and grids, and the positions of a sequence with videos, because
    transformers 5 counts them differently (see mrope_positions).
    """
    ids = token_ids[None]
    kinds = (ids == hf_config.image_token_id).long() + 2 * (ids == hf_config.video_token_id).long()
    inputs = {"mm_token_type_ids": kinds}
    for medium, patches, grids in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        shown = [image for image in images if image.medium == medium]
        if shown:
            inputs[patches] = torch.cat([image.patches() for image in shown])
            inputs[grids] = torch.tensor([image.grid for image in shown])
    if "video_grid_thw" in inputs:
        inputs["position_ids"] = positions[:, None]
    return inputs


def text_positions(
    hf_config: Any,
) -> Callable[[Tensor, Sequence[ProcessedImage]], tuple[Tensor, int]]:
    """Return the positions of prompts in a family without M-RoPE."""
    return plain_positions


def resize(processor: Any, pixels: Tensor, height: int, width: int) -> Tensor:
    """Return pixels [3, H, W] resized as transformers does. processor: transformers' processor of
    images or of videos. Its own `resize` is not called, because its arguments differ between
    releases of transformers.
    """
    from transformers.image_processing_backends import TorchvisionBackend
    from transformers.image_utils import SizeDict

    size = SizeDict(height=height, width=width)
    resized: Tensor = TorchvisionBackend.resize(processor, pixels[None], size, processor.resample)
    return resized[0]


images = ResizedImages


def format_of(processor: Any, *, is_sent_processed: bool = False) -> PatchFormat:
    """Return the format of an image or video processor's patches. is_sent_processed: True if
    servers are sent the frames of images and not pictures, and take them cut in patches.
    """
    return PatchFormat.of(
        processor,
        patch=processor.patch_size,
        temporal=processor.temporal_patch_size,
        merge=processor.merge_size,
        sends_frames=is_sent_processed,
        takes_patches=is_sent_processed,
    )
