"""Language model of MiniCPM-V 4.6, a Qwen3.5, and its tower, as plain values."""

from collections.abc import Mapping
from typing import Any

from megavlm.models.common.architecture import FolderNames, PatchSizes, Rotary
from megavlm.models.qwen3_5 import config as qwen3_5
from megavlm.models.qwen3_5.config import language_sizes

__all__ = [
    "FOLDER_NAMES",
    "SERVER_NAMES",
    "architecture",
    "language_sizes",
    "patch_sizes",
    "rotary",
    "served_config",
]

FOLDER_NAMES = FolderNames(
    sizes={"patch_size": "patch_size"},
    tokens={"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
)
WINDOW = 2  # side in patches of a window that one of the two mergers joins
SIDE = WINDOW**2  # side in patches of the square that becomes one token

SERVER_NAMES = (
    (r"^model\.(layers|embed_tokens|norm)\b", r"llm.\1"),
    (r"^vision_tower\.(.*\.)out_proj\b", r"vision_tower.\1proj"),
    (r"^vision_tower\b", "vpm"),
    (r"^merger\b", "resampler"),
)

# Values of a config.json with which the models are released, and which alone are implemented.
_RELEASED = {
    "downsample_mode": "16x",
    "merger_times": 1,
    "drop_vision_last_layer": False,
    "merge_kernel_size": (WINDOW, WINDOW),
}


def architecture(hf_config: Any) -> dict[str, Any]:
    """Return LanguageConfig's fields for transformers' MiniCPMV4_6Config. Raises ValueError for
    settings that are not implemented.
    """
    text = hf_config.text_config
    if text.model_type != "qwen3_5_text":
        raise ValueError(
            f"text_config.model_type: {text.model_type!r} is not supported in MiniCPM-V; use "
            "qwen3_5_text."
        )
    for name, released in _RELEASED.items():
        value = getattr(hf_config, name)
        if (tuple(value) if isinstance(value, list) else value) != released:
            raise ValueError(f"{name}: {value!r} is not supported; use {released!r}.")
    vision = hf_config.vision_config
    if tuple(vision.window_kernel_size) != (WINDOW, WINDOW):
        raise ValueError(
            f"vision_config.window_kernel_size: {vision.window_kernel_size!r} is not supported; "
            f"use {(WINDOW, WINDOW)!r}."
        )
    if not 0 <= vision.insert_layer_id < vision.num_hidden_layers:
        raise ValueError(
            f"insert_layer_id: {vision.insert_layer_id} is not one of the tower's "
            f"{vision.num_hidden_layers} layers."
        )
    return qwen3_5.architecture(hf_config)


def rotary(hf_config: Any) -> Rotary:
    """Return the rotary embedding: Qwen3.5's, of which all frequencies rotate with one axis. Raises
    ValueError for one that is not implemented.
    """
    rotated = qwen3_5.rotary(hf_config)
    return Rotary(rotated.head_dim, rotated.theta, (0,) * len(rotated.axes))


def patch_sizes(hf_config: Any) -> PatchSizes:
    """Return the sizes of the tower's input."""
    return PatchSizes(hf_config.vision_config.patch_size, 1, SIDE)


def served_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json, completed by the values that SGLang 0.5.23 reads and
    transformers does not need.
    """
    text = qwen3_5.served_config({**values, "vision_config": {}})["text_config"]
    text.setdefault("tie_word_embeddings", values.get("tie_word_embeddings", False))
    return {**values, "text_config": text}
