"""Tiny Qwen2.5-VL."""

from transformers import Qwen2_5_VLConfig

from megavlm.models.common.qwen_tiny import Sections, qwen2_text, qwen_family
from megavlm.models.common.tiny import TinySizes


def _sections(sizes: TinySizes) -> Sections:
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
    return qwen2_text(sizes), vision


TINY = {"qwen2_5_vl": qwen_family(Qwen2_5_VLConfig, _sections, ("full_attention_blocks",))}
