"""A tiny InternVL with random weights, as a complete HuggingFace folder."""

from pathlib import Path
from typing import Any

import torch

from megavlm.demo.tiny_model import train_tokenizer
from megavlm.models.common.qwen_tiny import CHAT_TEMPLATE, TOKENS
from megavlm.parallel.torchvision_ops import define_torchvision_operators

SIDE, PATCH, MERGE, MAX_TILES = 32, 8, 2, 4
TOKENS_PER_TILE = (SIDE // PATCH // MERGE) ** 2
# Names of InternVL's tokenizer for its special tokens.
SPECIAL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_TEMPLATE = CHAT_TEMPLATE.replace(
    "<|vision_start|><|image_pad|><|vision_end|>", SPECIAL["context_image_token"] + "\n"
)


def make_folder(folder: Path) -> None:
    """Write the model, large enough for two ranks on every axis, and its processor."""
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText, InternVLConfig

    tokenizer = _tokenizer()
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "attention_bias": True,
        "intermediate_size": 48,
        "image_size": [SIDE, SIDE],
        "patch_size": [PATCH, PATCH],
    }
    text = {
        "model_type": "qwen2",
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.get_vocab()[SPECIAL["context_image_token"]],
        image_seq_length=TOKENS_PER_TILE,
        downsample_ratio=1 / MERGE,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():  # no norm, bias, scale or table is left out unseen
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    _save_processor(folder, tokenizer)


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    base = train_tokenizer(["What color is it?"] * 10, TOKENS, max_vocab=512)
    base.add_special_tokens({"extra_special_tokens": [*SPECIAL.values()]})
    return PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        eos_token=base.eos_token,
        pad_token=base.pad_token,
        extra_special_tokens=SPECIAL,
    )


def _save_processor(folder: Path, tokenizer: Any) -> None:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    size = {"height": SIDE, "width": SIDE}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(
            size=size, max_patches=MAX_TILES, crop_to_patches=True
        ),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=TOKENS_PER_TILE,
        chat_template=_TEMPLATE,
    )
    processor.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
