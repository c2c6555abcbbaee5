"""Thinker of Qwen3-Omni as plain values. Its language model and its vision tower have the values of
Qwen3-VL's mixtures.
"""

from typing import Any

from megavlm.models.common.architecture import FolderNames
from megavlm.models.common.qwen_config import FOLDER_NAMES as QWEN_NAMES
from megavlm.models.common.qwen_config import patch_sizes
from megavlm.models.qwen3_vl.config import architecture as qwen_architecture
from megavlm.models.qwen3_vl.config import language_sizes, rotary

__all__ = [
    "CONVOLUTIONS",
    "FOLDER_NAMES",
    "SERVER_NAMES",
    "architecture",
    "count_tokens",
    "halved",
    "language_sizes",
    "patch_sizes",
    "rotary",
]

FOLDER_NAMES = FolderNames(
    sizes=QWEN_NAMES.sizes, tokens={**QWEN_NAMES.tokens, "audio_token_id": "<|audio_pad|>"}
)
SERVER_NAMES = (
    (r"^(audio_tower\..*\.self_attn)\.out_proj\.", r"\1.proj."),
    (r"^", "thinker."),
)


CONVOLUTIONS = 3  # of the audio tower; each halves time and frequency


def halved(size: int) -> int:
    """Return the size of an output of the convolutions of stride 2 for an input's size."""
    for _ in range(CONVOLUTIONS):
        size = (size + 1) // 2
    return size


def count_tokens(num_frames: int, chunk: int) -> int:
    """Return the number of tokens of a clip of log-mel frames, whose chunks are convolved alone."""
    return num_frames // chunk * halved(chunk) + halved(num_frames % chunk)


def architecture(hf_config: Any) -> dict[str, Any]:
    """Return LanguageConfig's fields for transformers' Qwen3OmniMoeThinkerConfig. Raises ValueError
    for settings that are not implemented.
    """
    audio = hf_config.audio_config
    if audio.activation_function != "gelu" or audio.scale_embedding:
        raise ValueError(
            f"audio_config: activation_function={audio.activation_function}, scale_embedding="
            f"{audio.scale_embedding}: only gelu without scale_embedding is supported, as released."
        )
    return qwen_architecture(hf_config)
