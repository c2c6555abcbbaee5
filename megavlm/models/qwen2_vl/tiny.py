"""Tiny Qwen2-VL."""

from transformers import Qwen2VLConfig

from megavlm.models.common.qwen_tiny import Sections, qwen2_text, qwen_family
from megavlm.models.common.tiny import TinySizes


def _sections(sizes: TinySizes) -> Sections:
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
    return qwen2_text(sizes), vision


TINY = {"qwen2_vl": qwen_family(Qwen2VLConfig, _sections)}
