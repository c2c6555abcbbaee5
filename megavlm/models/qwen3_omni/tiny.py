"""Tiny Qwen3-Omni, with a talker and a vocoder that are never trained."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import Qwen3OmniMoeConfig

from megavlm.models.common.qwen_tiny import CHAT_TEMPLATE as QWEN_TEMPLATE
from megavlm.models.common.qwen_tiny import END_OF_TURN, TOKENS, qwen_text, qwen_vision
from megavlm.models.common.tiny import EXPERT_OPTIONS, TinyFamily, TinySizes, marked_tokenizer
from megavlm.models.qwen3_vl.tiny import OPTIONS, mixture
from megavlm.parallel.torchvision_ops import define_torchvision_operators

MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_VIDEO = "{% elif content['type'] == 'video'"
CHAT_TEMPLATE = QWEN_TEMPLATE.replace(
    _VIDEO,
    "{% elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content %}"
    "<|audio_start|><|audio_pad|><|audio_end|>" + _VIDEO,
)
MEL = 16  # values of a log-mel frame; released models have 128


def _config(sizes: TinySizes, vocab_size: int, ids: Mapping[str, int]) -> Any:
    text, vision = mixture(sizes)
    thinker = {
        "text_config": text | qwen_text(sizes, vocab_size, ids) | {"norm_topk_prob": True},
        "vision_config": vision | qwen_vision(sizes),
        "audio_config": {
            "num_mel_bins": MEL,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "d_model": 64,
            "output_dim": sizes.hidden_size,
            "downsample_hidden_size": 8,
            "n_window": 50,
            "n_window_infer": 200,
            "initializer_range": sizes.init_std,
        },
        "position_id_per_seconds": 13,
        "initializer_range": sizes.init_std,
        "tie_word_embeddings": sizes.tied_embeddings,
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    return Qwen3OmniMoeConfig(
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
        thinker_config=thinker,
        talker_config=_talker(sizes),
        code2wav_config={
            "codebook_size": 16,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_quantizers": 4,
            "upsample_rates": [2, 2],
            "upsampling_ratios": [2],
            "decoder_dim": 16,
        },
        im_start_token_id=ids["<|im_start|>"],
        im_end_token_id=ids[END_OF_TURN],
    )


def _talker(sizes: TinySizes) -> dict[str, Any]:
    text = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    codes = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_code_groups": 4,
    }
    return {
        "text_config": text,
        "code_predictor_config": codes,
        "num_code_groups": 4,
        "thinker_hidden_size": sizes.hidden_size,
        "accept_hidden_layer": 1,
        "spatial_merge_size": 2,
    }


def _processor(config: Any, tokenizer: Any, max_pixels: int | None) -> Any:
    define_torchvision_operators()
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3OmniMoeProcessor,
        WhisperFeatureExtractor,
    )

    factor, half = 32, [0.5] * 3
    values = {
        "min_pixels": (2 * factor) ** 2,
        "max_pixels": max_pixels or 1280 * factor**2,
        "patch_size": 16,
        "image_mean": half,
        "image_std": half,
    }
    return Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(**values),
        video_processor=Qwen2VLVideoProcessor(**values),
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL),
        tokenizer=marked_tokenizer(tokenizer, MARKS),
        chat_template=CHAT_TEMPLATE,
    )


TINY = {
    "qwen3_omni_moe": TinyFamily(
        options=frozenset({*OPTIONS, *EXPERT_OPTIONS}),
        tokens=replace(
            TOKENS,
            special=(*TOKENS.special, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
            chat_template=CHAT_TEMPLATE,
        ),
        config=_config,
        processor=_processor,
    )
}
