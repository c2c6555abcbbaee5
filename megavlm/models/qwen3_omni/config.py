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
    "FOLDER_NAMES",
    "SERVER_NAMES",
    "architecture",
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
