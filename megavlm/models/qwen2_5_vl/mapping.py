"""Mapping of Qwen2.5-VL between hub tensors and this model's tensors."""

from collections.abc import Iterator
from typing import Any

from megavlm.models.common.mapping import Entry
from megavlm.models.common.mapping_parts import attention, eagle3_head, language_model, mlp, tower
from megavlm.models.qwen2_5_vl.vision import VisionTower


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' Qwen2_5_VLConfig."""
    return [*tower("visual", VisionTower, config), *text_entries(config)]


def draft_mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor of the EAGLE-3 draft head."""
    return [*eagle3_head(config.text_config)]


def text_entries(config: Any) -> Iterator[Entry]:
    """Yield the entries of the language model of Qwen2.5-VL or Qwen2-VL."""
    text = config.text_config
    head_dim = text.hidden_size // text.num_attention_heads

    def layer(_: int, megatron: str, hf: str) -> Iterator[Entry]:
        yield from attention(text, megatron, hf, head_dim=head_dim, qkv_bias=True, qk_norm=False)
        yield from mlp(text, megatron, hf)

    return language_model(config, "model", layer)
