"""A family's parts by model_type, without a model around them."""

import importlib
from types import ModuleType
from typing import Any

from megavlm import families
from megavlm.model_config import trained_config
from megavlm.models.common.mapping import Entry
from megavlm.models.common.tiny import TinySizes, tiny_config, tiny_family

FAMILIES = tuple(families.FAMILIES)
# Kinds of models that share a model_type with another, by their names in tests.
MODEL_TYPES = {"internvl_moe": "internvl"}


def model_type(family: str) -> str:
    """The model_type of a kind of models."""
    return MODEL_TYPES.get(family, family)


def is_tower(hf: str) -> bool:
    """Whether an HF tensor belongs to the tower or its mergers."""
    return any(
        part in hf
        for part in (
            "visual.",
            "vision_tower.",
            "merger.",
            "multi_modal_projector.",
            "audio_tower.",
        )
    )


def vision_tokens(config: Any) -> tuple[int, ...]:
    """Tokens that features replace."""
    names = ("image_token_id", "video_token_id", "audio_token_id")
    return tuple(getattr(config, name) for name in names if hasattr(config, name))


def part(model_type: str, name: str) -> ModuleType:
    """The module `config`, `mapping`, `vision` or `inputs` of a family."""
    return importlib.import_module(f"{families.FAMILIES[model_type].package}.{name}")


def entries_of(config: Any) -> list[Entry]:
    entries: list[Entry] = part(config.model_type, "mapping").mapping(config)
    return entries


def small_config(family: str, **sizes: Any) -> Any:
    """Everything that a family can have, cut by up to four ranks."""
    plain = {
        "hidden_size": 64,
        "num_layers": 2,
        "ffn_size": 96,
        "num_heads": 8,
        "num_kv_heads": 4,
        "vision_depth": 2,
        "vision_hidden_size": 32,
        "vision_ffn_size": 64,
    }
    kind = model_type(family)
    if family == "internvl_moe":
        plain["num_experts"] = 4
    if "head_dim" in tiny_family(kind).options:
        plain["head_dim"] = 16  # 8 heads of it are more than 64
    if "linear_head_dim" in tiny_family(kind).options:
        plain["num_layers"] = 4  # the fourth has attention
    if family == "qwen3_5_moe":
        plain["moe_ffn_size"] = 48
    if family in ("qwen3_vl_moe", "qwen3_omni_moe"):
        plain |= {"dense_layers": [1], "moe_ffn_size": 48}
    ids = {token: i for i, token in enumerate(tiny_family(kind).tokens.special)}
    return trained_config(tiny_config(kind, TinySizes(**{**plain, **sizes}), 128, ids))


def build_in_transformers(config: Any, device: str = "meta") -> Any:
    """transformers' model; on the meta device it takes no memory."""
    import torch

    from megavlm.parallel.torchvision_ops import define_torchvision_operators

    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText

    with torch.device(device):
        return AutoModelForImageTextToText.from_config(config)
