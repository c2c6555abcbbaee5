"""Inputs of Qwen3-Omni's thinker: images as in Qwen3-VL, a video as one run of tokens, and audio,
whose tokens have the positions of text.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megavlm.config.data import Data
from megavlm.data.media.audio import AudioProcessor
from megavlm.data.media.image_processing import ImageCache, ProcessedImage
from megavlm.models.common.inputs import MultimodalPositions, ResizedImages, format_of
from megavlm.models.common.inputs import model_inputs as vision_inputs
from megavlm.models.qwen2_5_vl.inputs import TokensOnly, timed_span
from megavlm.models.qwen3_omni.config import count_tokens

__all__ = ["audio", "images", "model_inputs", "positions", "videos"]


def images(hf_config: Any, processor: Any, data: Data, cache: ImageCache) -> ResizedImages:
    """Return the images of prompts. processor: transformers' processor, which in this family cannot
    count an image's tokens, as SGLang asks it to.
    """
    return ResizedImages(hf_config, processor, data, cache, is_sent_processed=True)


class Videos(TokensOnly):
    """Videos within the bounds that transformers' processor of this family sets by itself,
    whatever the model folder has.
    """

    def folder_bounds(self, processor: Any) -> tuple[int, int]:
        size = processor.valid_processor_kwargs._defaults["videos_kwargs"]["size"]
        return size["shortest_edge"], size["longest_edge"]


videos = Videos


def audio(hf_config: Any, processor: Any, cache: ImageCache) -> AudioProcessor:
    """Return the audio of prompts."""
    return AudioProcessor(
        hf_config.audio_token_id,
        format_of(processor.image_processor, is_sent_processed=True),
        processor.feature_extractor,
        partial(count_tokens, chunk=2 * hf_config.audio_config.n_window),
        cache,
    )


def positions(hf_config: Any) -> MultimodalPositions:
    """Return the positions of prompts."""
    return MultimodalPositions(hf_config, partial(timed_span, hf_config.position_id_per_seconds))


def model_inputs(
    hf_config: Any, token_ids: Tensor, positions: Tensor, images: Sequence[ProcessedImage]
) -> dict[str, Tensor]:
    """Return patches and grids, the log-mel frames of clips, and the positions, because
    transformers has times of videos between two integers.
    """
    inputs = vision_inputs(hf_config, token_ids, positions, images)
    del inputs["mm_token_type_ids"]
    if clips := [image.patches() for image in images if image.medium == "audio"]:
        inputs["input_features"] = pad_sequence(clips, batch_first=True).transpose(1, 2)
        ones = [torch.ones(len(clip), dtype=torch.long) for clip in clips]
        inputs["feature_attention_mask"] = pad_sequence(ones, batch_first=True)
    return inputs | {"position_ids": positions[:, None]}
