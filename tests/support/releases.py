"""The released models' configurations, as their config.json has them on the hub (older than
transformers 5).
"""

import json
from pathlib import Path
from typing import Any

from megavlm.families import model_values
from megavlm.model_config import model_config

Json = dict[str, Any]

_ENDS = {"bos_token_id": 151643, "eos_token_id": 151645}


def _qwen2_text(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, tied: bool
) -> Json:
    """Qwen2-VL and Qwen2.5-VL: flat, beside `vision_config`."""
    return {
        **_ENDS,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "vocab_size": vocabulary,
    }


def _qwen2_vl(*sizes: Any) -> Json:
    vision = {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": sizes[1],
        "in_chans": 3,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    }
    return {"model_type": "qwen2_vl", **_qwen2_text(*sizes), "vision_config": vision}


def _qwen2_5_vl(vision_ffn: int, *sizes: Any) -> Json:
    vision = {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": vision_ffn,
        "num_heads": 16,
        "out_hidden_size": sizes[1],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    }
    return {"model_type": "qwen2_5_vl", **_qwen2_text(*sizes), "vision_config": vision}


def _qwen3_text(layers: int, hidden: int, heads: int, kv_heads: int) -> Json:
    """What the language models of Qwen3-VL and Qwen3.5 share."""
    return {
        **_ENDS,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "max_position_embeddings": 262144,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
    }


def _qwen3_vl(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    *,
    tied: bool = False,
    small_tower: bool = False,
    moe: Json | None = None,
) -> Json:
    text = {
        **_qwen3_text(layers, hidden, heads, kv_heads),
        "head_dim": 128,
        "intermediate_size": ffn,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "vocab_size": 151936,
        **(moe or {}),
    }
    levels = [5, 11, 17] if small_tower else [8, 16, 24]
    return {
        "model_type": "qwen3_vl_moe" if moe else "qwen3_vl",
        "text_config": text,
        "tie_word_embeddings": tied,
        "vision_config": _qwen3_vision(hidden, levels, small=small_tower),
    }


def _qwen3_vision(hidden: int, levels: list[int], *, small: bool = False) -> Json:
    depth, size, ffn = (24, 1024, 4096) if small else (27, 1152, 4304)
    return {
        "deepstack_visual_indexes": levels,
        "depth": depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": size,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": hidden,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _qwen3_5(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    value_heads: int,
    *,
    moe: Json | None = None,
) -> Json:
    text = {
        **_qwen3_text(layers, hidden, heads, kv_heads),
        "full_attention_interval": 4,
        "head_dim": 256,
        **({} if moe else {"intermediate_size": ffn}),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "vocab_size": 248320,
        **(moe or {}),
    }
    return {
        "model_type": "qwen3_5_moe" if moe else "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": _qwen3_vision(hidden, []),
    }


def _shared_moe(ffn: int, experts: int, chosen: int) -> Json:
    return {
        "moe_intermediate_size": ffn,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "shared_expert_intermediate_size": ffn,
    }


def _glm4v(layers: int, heads: int, kv_heads: int, ffn: int, moe: Json | None = None) -> Json:
    text = {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": 65536,
        "model_type": "glm4v_moe_text" if moe else "glm4v_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        "rope_theta": 10000.0,
        "vocab_size": 151552,
        **(moe or {}),
    }
    vision = {
        "attention_bias": False,
        "depth": 24,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "image_size": 336,
        "in_channels": 3,
        "intermediate_size": ffn,
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return {
        "image_end_token_id": 151340,
        "image_start_token_id": 151339,
        "image_token_id": 151363 if moe else 151343,
        "model_type": "glm4v_moe" if moe else "glm4v",
        "text_config": text,
        "tie_word_embeddings": False,
        "video_end_token_id": 151342,
        "video_start_token_id": 151341,
        "video_token_id": 151364 if moe else 151344,
        "vision_config": vision,
    }


def _glm_moe() -> Json:
    return {
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    }


def _internvl(text: Json, *, large_tower: bool = False) -> Json:
    """InternVL3 and InternVL3.5 in transformers' form, as the authors' own converter writes it."""
    tower = {
        "attention_bias": not large_tower,
        "hidden_size": 3200 if large_tower else 1024,
        "intermediate_size": 12800 if large_tower else 4096,
        "norm_type": "rms_norm" if large_tower else "layer_norm",
        "num_attention_heads": 25 if large_tower else 16,
        "num_hidden_layers": 45 if large_tower else 24,
        "use_qk_norm": large_tower,
    }
    vision = {
        **tower,
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "image_size": [448, 448],
        "initializer_factor": 0.1,
        "layer_norm_eps": 1e-6,
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "num_channels": 3,
        "patch_size": [14, 14],
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
    }
    return {
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": 151671 if text["model_type"] != "qwen2" else 151667,
        "model_type": "internvl",
        "projector_hidden_act": "gelu",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": vision,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


def _internvl3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> Json:
    text = {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": 32768,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151674,
    }
    return _internvl(text, **more)


def _internvl3_5(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    *,
    moe: Json | None = None,
    **more: Any,
) -> Json:
    text = {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": 40960,
        "model_type": "qwen3_moe" if moe else "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
        **(moe or {}),
    }
    return _internvl(text, **more)


def _minicpmv4_6() -> Json:
    """MiniCPM-V 4.6, whose language model is Qwen3.5-0.8B's."""
    text = _qwen3_5(24, 1024, 8, 2, 3584, 16)["text_config"]
    return {
        "drop_vision_last_layer": False,
        "image_size": 1120,
        "image_token_id": 248056,
        "model_type": "minicpmv4_6",
        "text_config": {**text, "model_type": "qwen3_5_text", "tie_word_embeddings": True},
        "tie_word_embeddings": True,
        "video_token_id": 248057,
        "vision_config": {
            "attention_dropout": 0.0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "image_size": 980,
            "intermediate_size": 4304,
            "layer_norm_eps": 1e-6,
            "model_type": "minicpmv4_6_vision",
            "num_attention_heads": 16,
            "num_channels": 3,
            "num_hidden_layers": 27,
            "patch_size": 14,
        },
    }


def _qwen3_omni() -> Json:
    """Qwen3-Omni-30B-A3B, without the models that speak."""
    values = _qwen3_vl(48, 2048, 32, 4, 768, moe=_moe(768))
    text = values["text_config"]
    text |= {
        "max_position_embeddings": 65536,
        "rope_scaling": {**text["rope_scaling"], "interleaved": True, "type": "default"},
        "rope_theta": 1000000,
        "shared_expert_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "use_sliding_window": False,
        "vocab_size": 152064,
    }
    audio = {
        "activation_function": "gelu",
        "conv_chunksize": 500,
        "d_model": 1280,
        "downsample_hidden_size": 480,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layers": 32,
        "max_source_positions": 1500,
        "n_window": 50,
        "n_window_infer": 800,
        "num_mel_bins": 128,
        "output_dim": 2048,
        "scale_embedding": False,
    }
    thinker = {
        "audio_config": audio,
        "audio_end_token_id": 151670,
        "audio_start_token_id": 151669,
        "audio_token_id": 151675,
        "dtype": "bfloat16",
        "image_token_id": 151655,
        "model_type": "qwen3_omni_moe_thinker",
        "position_id_per_seconds": 13,
        "text_config": {**text, "model_type": "qwen3_omni_moe_text"},
        "tie_word_embeddings": False,
        "video_token_id": 151656,
        "vision_config": values["vision_config"],
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }
    return {"dtype": "bfloat16", "model_type": "qwen3_omni_moe", "thinker_config": thinker}


def _moe(ffn: int) -> Json:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": ffn,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }


RELEASES = {
    "Qwen2-VL-2B": _qwen2_vl(28, 1536, 12, 2, 8960, 151936, True),
    "Qwen2-VL-7B": _qwen2_vl(28, 3584, 28, 4, 18944, 152064, False),
    "Qwen2-VL-72B": _qwen2_vl(80, 8192, 64, 8, 29568, 152064, False),
    "Qwen2.5-VL-3B": _qwen2_5_vl(3420, 36, 2048, 16, 2, 11008, 151936, True),
    "Qwen2.5-VL-7B": _qwen2_5_vl(3420, 28, 3584, 28, 4, 18944, 152064, False),
    "Qwen2.5-VL-32B": _qwen2_5_vl(3456, 64, 5120, 40, 8, 27648, 152064, False),
    "Qwen2.5-VL-72B": _qwen2_5_vl(3456, 80, 8192, 64, 8, 29568, 152064, False),
    "Qwen3-VL-2B": _qwen3_vl(28, 2048, 16, 8, 6144, tied=True, small_tower=True),
    "Qwen3-VL-4B": _qwen3_vl(36, 2560, 32, 8, 9728, tied=True, small_tower=True),
    "Qwen3-VL-8B": _qwen3_vl(36, 4096, 32, 8, 12288),
    "Qwen3-VL-32B": _qwen3_vl(64, 5120, 64, 8, 25600),
    "Qwen3-VL-30B-A3B": _qwen3_vl(48, 2048, 32, 4, 6144, moe=_moe(768)),
    "Qwen3-VL-235B-A22B": _qwen3_vl(94, 4096, 64, 4, 12288, moe=_moe(1536)),
    "Qwen3.5-4B": _qwen3_5(32, 2560, 16, 4, 9216, 32),
    "Qwen3.5-9B": _qwen3_5(32, 4096, 16, 4, 12288, 32),
    "Qwen3.5-27B": _qwen3_5(64, 5120, 24, 4, 17408, 48),
    "Qwen3.5-35B-A3B": _qwen3_5(40, 2048, 16, 2, 512, 32, moe=_shared_moe(512, 256, 8)),
    "GLM-4.1V-9B-Thinking": _glm4v(40, 32, 2, 13696),
    "GLM-4.6V": _glm4v(46, 96, 8, 10944, moe=_glm_moe()),
    "InternVL3-8B-hf": _internvl3(28, 3584, 28, 4, 18944),
    "InternVL3-78B-hf": _internvl3(80, 8192, 64, 8, 29568, large_tower=True),
    "InternVL3_5-8B-HF": _internvl3_5(36, 4096, 32, 8, 12288),
    "InternVL3_5-30B-A3B-HF": _internvl3_5(48, 2048, 32, 4, 6144, moe=_moe(768)),
    "InternVL3_5-241B-A28B-HF": _internvl3_5(
        94, 4096, 64, 4, 12288, moe=_moe(1536), large_tower=True
    ),
    "MiniCPM-V-4.6": _minicpmv4_6(),
    "Qwen3-Omni-30B-A3B": _qwen3_omni(),
}


def released_config(release: str, folder: Path, **text: Any) -> Any:
    """transformers' configuration. `text`: what to change in it, of the language model."""
    config = json.loads(json.dumps(RELEASES[release]))
    released_text(config).update(text)
    (folder / "config.json").write_text(json.dumps(config))
    return model_config(folder)


def released_text(values: Json) -> Json:
    """The language model's values in a release's configuration."""
    model: Any = model_values(values)
    text: Json = model.get("text_config", model)
    return text
