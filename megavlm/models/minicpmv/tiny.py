"""Tiny MiniCPM-V 4.6."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import MiniCPMV4_6Config

from megavlm.models.common.qwen_tiny import TOKENS as QWEN_TOKENS
from megavlm.models.common.qwen_tiny import qwen_text
from megavlm.models.common.tiny import TinyFamily, TinySizes, marked_tokenizer, turns_template
from megavlm.models.qwen3_5.tiny import dense_text
from megavlm.parallel.torchvision_ops import define_torchvision_operators

PATCH, TABLE_SIDE, MAX_SLICES = 14, 8, 6
# Names in transformers' tokenizers.
MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
CHAT_TEMPLATE = turns_template("<|image_pad|>\n", "<|video_pad|>\n")
TOKENS = replace(
    QWEN_TOKENS,
    special=(*QWEN_TOKENS.special[:3], *MARKS.values()),
    chat_template=CHAT_TEMPLATE,
)


def _config(sizes: TinySizes, vocab_size: int, ids: Mapping[str, int]) -> Any:
    side = PATCH * (sizes.position_table_side or TABLE_SIDE)
    return MiniCPMV4_6Config(
        architectures=["MiniCPMV4_6ForConditionalGeneration"],
        text_config={
            "model_type": "qwen3_5_text",
            **qwen_text(sizes, vocab_size, ids),
            **dense_text(sizes),
        },
        vision_config={
            "num_hidden_layers": sizes.vision_depth,
            "hidden_size": sizes.vision_hidden_size,
            "intermediate_size": sizes.vision_ffn_size,
            "num_attention_heads": sizes.vision_num_heads,
            "image_size": side,
            "patch_size": PATCH,
            "initializer_range": sizes.init_std,
        },
        insert_layer_id=max(0, sizes.vision_depth // 2 - 1),
        image_size=side,
        image_token_id=ids[MARKS["image_token"]],
        video_token_id=ids[MARKS["video_token"]],
        tie_word_embeddings=sizes.tied_embeddings,
    )


def _processor(config: Any, tokenizer: Any, max_pixels: int | None) -> Any:
    define_torchvision_operators()
    from transformers import (
        MiniCPMV4_6ImageProcessor,
        MiniCPMV4_6Processor,
        MiniCPMV4_6VideoProcessor,
    )

    side = config.vision_config.image_size
    slices = MAX_SLICES if max_pixels is None else max(1, max_pixels // side**2)
    sizes = {"patch_size": PATCH, "scale_resolution": side}
    return MiniCPMV4_6Processor(
        image_processor=MiniCPMV4_6ImageProcessor(**sizes, max_slice_nums=slices),
        tokenizer=marked_tokenizer(tokenizer, MARKS),
        # A frame is small beside an image, and is shown whole.
        video_processor=MiniCPMV4_6VideoProcessor(**sizes, slice_mode=False),
        chat_template=CHAT_TEMPLATE,
    )


TINY = {
    "minicpmv4_6": TinyFamily(
        options=frozenset({"head_dim", "linear_head_dim", "position_table_side"}),
        tokens=TOKENS,
        config=_config,
        processor=_processor,
    )
}
