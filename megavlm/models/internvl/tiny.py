"""Tiny InternVL3 (Qwen2) and InternVL3.5 (Qwen3 with `head_dim`, Qwen3-MoE with `num_experts`). The
mixture has the layers of the tower of 6B parameters, the others of the tower of 300M.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import InternVLConfig

from megavlm.models.common.qwen_tiny import TOKENS as QWEN_TOKENS
from megavlm.models.common.qwen_tiny import qwen_text
from megavlm.models.common.tiny import (
    EXPERT_OPTIONS,
    TinyFamily,
    TinySizes,
    marked_tokenizer,
    turns_template,
)
from megavlm.models.internvl.config import SERVED_LANGUAGE
from megavlm.parallel.torchvision_ops import define_torchvision_operators

PATCH, MERGE, TABLE_SIDE, MAX_TILES = 14, 2, 8, 6
# ImageNet's, as in the released models.
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
# Names in transformers' tokenizers.
MARKS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
# The template of transformers' form.
CHAT_TEMPLATE = turns_template("<IMG_CONTEXT>\n", "<video>\n")
TOKENS = replace(
    QWEN_TOKENS,
    special=(*QWEN_TOKENS.special[:3], *MARKS.values()),
    chat_template=CHAT_TEMPLATE,
    roles=(*QWEN_TOKENS.roles, "Frame"),
)


def _config(sizes: TinySizes, vocab_size: int, ids: Mapping[str, int]) -> Any:
    side = PATCH * (sizes.position_table_side or TABLE_SIDE)
    text, is_moe = _text(sizes), sizes.num_experts is not None
    return InternVLConfig(
        architectures=["InternVLForConditionalGeneration"],
        text_config={
            **qwen_text(sizes, vocab_size, ids),
            **text,
            "architectures": [SERVED_LANGUAGE[text["model_type"]]],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        vision_config={
            "num_hidden_layers": sizes.vision_depth,
            "hidden_size": sizes.vision_hidden_size,
            "intermediate_size": sizes.vision_ffn_size,
            "num_attention_heads": sizes.vision_num_heads,
            "attention_bias": not is_moe,
            "use_qk_norm": is_moe,
            "norm_type": "rms_norm" if is_moe else "layer_norm",
            "image_size": [side, side],
            "patch_size": [PATCH, PATCH],
            "initializer_range": sizes.init_std,
        },
        image_token_id=ids[MARKS["context_image_token"]],
        image_seq_length=(side // PATCH // MERGE) ** 2,
        downsample_ratio=1 / MERGE,
        tie_word_embeddings=sizes.tied_embeddings,
    )


def _text(sizes: TinySizes) -> dict[str, Any]:
    if sizes.num_experts is None:
        if sizes.head_dim is None:
            return {"model_type": "qwen2"}
        return {"model_type": "qwen3", "head_dim": sizes.head_dim}
    return {
        "model_type": "qwen3_moe",
        "head_dim": sizes.head_dim or sizes.hidden_size // sizes.num_heads,
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.experts_per_token or 2,
        "moe_intermediate_size": sizes.expert_ffn_size,
        "mlp_only_layers": list(sizes.dense_layers or ()),
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }


def _processor(config: Any, tokenizer: Any, max_pixels: int | None) -> Any:
    define_torchvision_operators()
    from transformers import (
        GotOcr2ImageProcessor,
        InternVLProcessor,
        InternVLVideoProcessor,
    )

    side = config.vision_config.image_size[0]
    size = {"height": side, "width": side}
    numbers = {"size": size, "image_mean": MEAN, "image_std": STD}
    tiles = MAX_TILES if max_pixels is None else max(1, max_pixels // side**2)
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(**numbers, max_patches=tiles, crop_to_patches=True),
        tokenizer=marked_tokenizer(tokenizer, MARKS),
        video_processor=InternVLVideoProcessor(**numbers),
        image_seq_length=config.image_seq_length,
        chat_template=CHAT_TEMPLATE,
    )


TINY = {
    "internvl": TinyFamily(
        options=frozenset({"head_dim", "position_table_side", *EXPERT_OPTIONS}),
        tokens=TOKENS,
        config=_config,
        processor=_processor,
    )
}
