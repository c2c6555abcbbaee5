"""Tiny Qwen3.5, dense and MoE."""

from typing import Any

from transformers import Qwen3_5Config, Qwen3_5MoeConfig

from megavlm.models.common.qwen_tiny import Sections, qwen_family
from megavlm.models.common.tiny import TinySizes, interleaved_mrope_section
from megavlm.models.qwen3_5.config import FULL_ATTENTION_INTERVAL, PARTIAL_ROTARY_FACTOR


def dense_text(sizes: TinySizes) -> dict[str, Any]:
    """Return the values of a dense text_config that are the family's own."""
    head_dim = sizes.head_dim or 64
    interval = min(FULL_ATTENTION_INTERVAL, sizes.num_layers)  # the last layer has full attention
    return {
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


def _dense(sizes: TinySizes) -> Sections:
    vision = {
        "hidden_size": sizes.vision_hidden_size,
        "intermediate_size": sizes.vision_ffn_size,
        "out_hidden_size": sizes.hidden_size,
        "num_position_embeddings": (sizes.position_table_side or 8) ** 2,
        "patch_size": 16,
        "deepstack_visual_indexes": [],  # SGLang assumes three levels if it is absent
    }
    return dense_text(sizes), vision


def _mixture(sizes: TinySizes) -> Sections:
    text, vision = _dense(sizes)
    ffn = sizes.expert_ffn_size
    text |= {
        "num_experts": sizes.num_experts or 4,
        "num_experts_per_tok": sizes.experts_per_token or 2,
        "moe_intermediate_size": ffn,
        "shared_expert_intermediate_size": ffn,
    }
    return text, vision


_OPTIONS = ("head_dim", "linear_head_dim", "position_table_side")
_EXPERTS = ("num_experts", "experts_per_token", "moe_ffn_size")  # no layer is dense
TINY = {
    "qwen3_5": qwen_family(Qwen3_5Config, _dense, _OPTIONS),
    # Released files stack experts in the same way as transformers in memory, but transformers'
    # "original format" has a tensor for each expert.
    "qwen3_5_moe": qwen_family(
        Qwen3_5MoeConfig, _mixture, (*_OPTIONS, *_EXPERTS), has_original_form=False
    ),
}
