"""Configurations of tiny Qwen-VL models: each family's own format with small sizes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import (
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from megavlm.models.qwen3_5.config import FULL_ATTENTION_INTERVAL, PARTIAL_ROTARY_FACTOR

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

_QWEN2_5 = ("qwen2_5_vl",)
_QWEN3_VL = ("qwen3_vl", "qwen3_vl_moe")
_QWEN3 = (*_QWEN3_VL, "qwen3_5", "qwen3_5_moe")
_QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
_MOE = ("qwen3_vl_moe", "qwen3_5_moe")
# Options that only some families have; None means the default.
_ONLY = {
    "full_attention_blocks": _QWEN2_5,
    "head_dim": _QWEN3,
    "linear_head_dim": _QWEN3_5,
    "deepstack_blocks": _QWEN3_VL,
    "position_table_side": _QWEN3,
    "num_experts": _MOE,
    "experts_per_token": _MOE,
    "moe_ffn_size": _MOE,
    "dense_layers": ("qwen3_vl_moe",),
}


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny model.

    full_attention_blocks (Qwen2.5-VL): tower blocks without windows, all by default; the others
        have windows of 112 pixels.
    head_dim (Qwen3-VL, Qwen3.5): hidden_size / num_heads by default; in Qwen3.5 64, of which a
        quarter gets rotary embeddings.
    linear_head_dim (Qwen3.5): of keys and values in linear attention; 16 and 24 by default.
    deepstack_blocks (Qwen3-VL): tower blocks whose output becomes a DeepStack level, by default the
        first three, or as many as there are tower blocks and language layers.
    position_table_side (Qwen3-VL, Qwen3.5): the learned table has side x side positions; 8 by
        default.
    num_experts, experts_per_token, moe_ffn_size (MoE): 4, 2 and 3/8 of ffn_size by default, the
        last rounded up to a multiple of 16.
    dense_layers (Qwen3-VL MoE): layers with a dense MLP of ffn_size; none by default.
    """

    hidden_size: int = 128
    num_layers: int = 3
    ffn_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None
    linear_head_dim: int | None = None
    tied_embeddings: bool = False
    vision_depth: int = 3
    vision_hidden_size: int = 96
    vision_ffn_size: int = 192
    vision_num_heads: int = 4
    full_attention_blocks: Sequence[int] | None = None
    deepstack_blocks: Sequence[int] | None = None
    position_table_side: int | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    moe_ffn_size: int | None = None
    dense_layers: Sequence[int] | None = None
    init_std: float = 0.02


def tiny_config(
    family: str, sizes: TinySizes, vocab_size: int, token_ids: Mapping[str, int]
) -> PreTrainedConfig:
    """Return the family's transformers configuration.

    token_ids: ids of the special tokens. Raises ValueError for an unknown family, an option that
    the family does not have, or sizes that its checkpoints cannot hold.
    """
    if family not in TINY_FAMILIES:
        raise ValueError(
            f"family: {family!r} has no tiny model; use one of {', '.join(TINY_FAMILIES)}"
        )
    for field in fields(sizes):
        only = _ONLY.get(field.name, (family,))
        if getattr(sizes, field.name) is not None and family not in only:
            raise ValueError(f"{field.name}: {family} has no such option, only {', '.join(only)}")
    config_class, sections = TINY_FAMILIES[family]
    text, vision = sections(sizes)
    text |= {
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.ffn_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "initializer_range": sizes.init_std,
        "tie_word_embeddings": sizes.tied_embeddings,
        "bos_token_id": token_ids[END_OF_TEXT],
        "eos_token_id": token_ids[END_OF_TURN],
        "pad_token_id": token_ids[END_OF_TEXT],
    }
    vision |= {
        "depth": sizes.vision_depth,
        "num_heads": sizes.vision_num_heads,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": sizes.init_std,
    }
    return config_class(
        architectures=[config_class.__name__.replace("Config", "ForConditionalGeneration")],
        text_config=text,
        vision_config=vision,
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        tie_word_embeddings=sizes.tied_embeddings,
    )


def mrope_section(head_dim: int) -> list[int]:
    """Return Qwen2-VL's numbers of frequencies for time, height and width, in the released ratio
    2 : 3 : 3. They sum to head_dim / 2.
    """
    spatial = 3 * head_dim // 16
    return [head_dim // 2 - 2 * spatial, spatial, spatial]


def interleaved_mrope_section(head_dim: int) -> list[int]:
    """Return Qwen3-VL's numbers of frequencies, in the released ratio 6 : 5 : 5."""
    spatial = 5 * head_dim // 32
    return [head_dim // 2 - 2 * spatial, spatial, spatial]


ConfigSection = dict[str, Any]


def _qwen2_text(sizes: TinySizes) -> ConfigSection:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "type": "default",
            "rope_theta": 1e6,
            "mrope_section": mrope_section(sizes.hidden_size // sizes.num_heads),
        }
    }


def _qwen2_vl(sizes: TinySizes) -> tuple[ConfigSection, ConfigSection]:
    ratio, remainder = divmod(sizes.vision_ffn_size, sizes.vision_hidden_size)
    if remainder:
        raise ValueError(
            f"vision_ffn_size: {sizes.vision_ffn_size} is not a multiple of vision_hidden_size "
            f"{sizes.vision_hidden_size}, but qwen2_vl's configuration holds only their ratio"
        )
    vision = {
        "embed_dim": sizes.vision_hidden_size,
        "hidden_size": sizes.hidden_size,
        "mlp_ratio": ratio,
        "patch_size": 14,
        "in_chans": 3,  # in released files, too: SGLang reads it, transformers does not
    }
    return _qwen2_text(sizes), vision


def _qwen2_5_vl(sizes: TinySizes) -> tuple[ConfigSection, ConfigSection]:
    full = sizes.full_attention_blocks
    vision = {
        "hidden_size": sizes.vision_hidden_size,
        "intermediate_size": sizes.vision_ffn_size,
        "out_hidden_size": sizes.hidden_size,
        "fullatt_block_indexes": list(range(sizes.vision_depth) if full is None else full),
        "window_size": 112,
        "patch_size": 14,
        "tokens_per_second": 2,
    }
    return _qwen2_text(sizes), vision


def _qwen3_vl(sizes: TinySizes) -> tuple[ConfigSection, ConfigSection]:
    head_dim = sizes.head_dim or sizes.hidden_size // sizes.num_heads
    text = {
        "head_dim": head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": interleaved_mrope_section(head_dim),
            "mrope_interleaved": True,
        },
    }
    blocks = sizes.deepstack_blocks
    if blocks is None:
        blocks = range(min(3, sizes.vision_depth, sizes.num_layers))
    vision = {
        "hidden_size": sizes.vision_hidden_size,
        "intermediate_size": sizes.vision_ffn_size,
        "out_hidden_size": sizes.hidden_size,
        "deepstack_visual_indexes": list(blocks),
        "num_position_embeddings": (sizes.position_table_side or 8) ** 2,
        "patch_size": 16,
    }
    return text, vision


def _qwen3_vl_moe(sizes: TinySizes) -> tuple[ConfigSection, ConfigSection]:
    ffn = sizes.moe_ffn_size or -(-3 * sizes.ffn_size // 128) * 16
    if sizes.hidden_size in (ffn, 2 * ffn):
        raise ValueError(
            f"moe_ffn_size: {ffn} makes an expert tensor square under hidden_size "
            f"{sizes.hidden_size}, but transformers decides by its shape whether to transpose it"
        )
    text, vision = _qwen3_vl(sizes)
    text |= {
        "num_experts": sizes.num_experts or 4,
        "num_experts_per_tok": sizes.experts_per_token or 2,
        "moe_intermediate_size": ffn,
        "mlp_only_layers": list(sizes.dense_layers or ()),
        "decoder_sparse_step": 1,
    }
    return text, vision


def _qwen3_5(sizes: TinySizes) -> tuple[ConfigSection, ConfigSection]:
    head_dim = sizes.head_dim or 64
    interval = min(FULL_ATTENTION_INTERVAL, sizes.num_layers)  # the last layer has full attention
    text = {
        "head_dim": head_dim,
        # Released files have both: transformers reads the first of each pair, SGLang the second.
        "layer_types": [
            "linear_attention" if (index + 1) % interval else "full_attention"
            for index in range(sizes.num_layers)
        ],
        "full_attention_interval": interval,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": PARTIAL_ROTARY_FACTOR,
            "mrope_section": interleaved_mrope_section(int(head_dim * PARTIAL_ROTARY_FACTOR)),
            "mrope_interleaved": True,
        },
        "partial_rotary_factor": PARTIAL_ROTARY_FACTOR,
        "linear_num_key_heads": sizes.num_kv_heads,
        "linear_num_value_heads": 2 * sizes.num_kv_heads,
        "linear_key_head_dim": sizes.linear_head_dim or 16,
        "linear_value_head_dim": sizes.linear_head_dim or 24,
        "linear_conv_kernel_dim": 4,
    }
    vision = {
        "hidden_size": sizes.vision_hidden_size,
        "intermediate_size": sizes.vision_ffn_size,
        "out_hidden_size": sizes.hidden_size,
        "num_position_embeddings": (sizes.position_table_side or 8) ** 2,
        "patch_size": 16,
        "deepstack_visual_indexes": [],  # SGLang assumes three levels if it is absent
    }
    return text, vision


def _qwen3_5_moe(sizes: TinySizes) -> tuple[ConfigSection, ConfigSection]:
    text, vision = _qwen3_5(sizes)
    ffn = sizes.moe_ffn_size or -(-3 * sizes.ffn_size // 128) * 16
    text |= {
        "num_experts": sizes.num_experts or 4,
        "num_experts_per_tok": sizes.experts_per_token or 2,
        "moe_intermediate_size": ffn,
        "shared_expert_intermediate_size": ffn,
    }
    return text, vision


TINY_FAMILIES: dict[
    str, tuple[type[Any], Callable[[TinySizes], tuple[ConfigSection, ConfigSection]]]
] = {
    "qwen2_vl": (Qwen2VLConfig, _qwen2_vl),
    "qwen2_5_vl": (Qwen2_5_VLConfig, _qwen2_5_vl),
    "qwen3_vl": (Qwen3VLConfig, _qwen3_vl),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, _qwen3_vl_moe),
    "qwen3_5": (Qwen3_5Config, _qwen3_5),
    "qwen3_5_moe": (Qwen3_5MoeConfig, _qwen3_5_moe),
}
