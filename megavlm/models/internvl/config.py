"""Language models of InternVL3 (Qwen2) and InternVL3.5 (Qwen3, dense and MoE), as plain values."""

from collections.abc import Mapping
from typing import Any

from megavlm.models.common.architecture import FolderNames, PatchSizes, Rotary, language_fields
from megavlm.models.qwen3_vl.config import expert_layers, language_sizes

__all__ = [
    "FOLDER_NAMES",
    "SERVER_NAMES",
    "architecture",
    "expert_layers",
    "head_dim",
    "language_sizes",
    "merge_size",
    "patch_sizes",
    "rotary",
    "served_values",
    "square_side",
]

# Chat templates write <video> for a video, and prompts have frames in its place. In InternVL3 the
# embedding has no row for it.
FOLDER_NAMES = FolderNames(
    sizes={}, tokens={"image_token_id": "<IMG_CONTEXT>"}, only_in_templates=("<video>",)
)

# SGLang's classes of the language models, by transformers' model_type.
SERVED_LANGUAGE = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

SERVER_NAMES = (
    (r"^(model\.(layers|embed_tokens|norm)|lm_head)\b", r"language_model.\1"),
    (r"^vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (
        r"^vision_tower\.embeddings\.patch_embeddings\.projection",
        "vision_model.embeddings.patch_embedding",
    ),
    (
        r"^vision_tower\.embeddings\.position_embeddings",
        "vision_model.embeddings.position_embedding",
    ),
    (r"^vision_tower\.encoder\.layer\b", "vision_model.encoder.layers"),
    (r"^(vision_model\..*)\.attention\.projection_layer\b", r"\1.attn.attn.proj"),
    (r"^(vision_model\..*)\.attention\b", r"\1.attn.attn"),
    (r"^(vision_model\..*)\.lambda_(\d)", r"\1.ls\2"),
    (r"^(vision_model\..*)\.layernorm_before\b", r"\1.norm1"),
    (r"^(vision_model\..*)\.layernorm_after\b", r"\1.norm2"),
    (r"^multi_modal_projector\.layer_norm\b", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1\b", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2\b", "mlp1.3"),
)


def architecture(hf_config: Any) -> dict[str, Any]:
    """Return LanguageConfig's fields for transformers' InternVLConfig. Raises ValueError for
    settings that are not implemented.
    """
    text = hf_config.text_config
    if text.model_type not in SERVED_LANGUAGE:
        raise ValueError(
            f"text_config.model_type: {text.model_type!r} is not supported in InternVL; use one of "
            f"{', '.join(SERVED_LANGUAGE)}."
        )
    if hf_config.vision_feature_layer != -1:
        raise ValueError(
            f"vision_feature_layer: {hf_config.vision_feature_layer} is not supported; use -1."
        )
    is_qwen2, sizes = text.model_type == "qwen2", language_sizes(text.to_dict())
    return language_fields(text, sizes, qkv_bias=is_qwen2, qk_norm=not is_qwen2)


def rotary(hf_config: Any) -> Rotary:
    """Return the rotary embedding: all frequencies rotate with one axis. Raises ValueError for one
    that is not implemented.

    The dynamic scaling of InternVL3 changes nothing up to `max_position_embeddings`.
    """
    text = hf_config.text_config
    parameters = text.rope_parameters
    if parameters["rope_type"] not in ("default", "dynamic"):
        raise ValueError(
            f"text_config.rope_parameters: rope_type {parameters['rope_type']!r} is not supported; "
            "use default or dynamic."
        )
    size = head_dim(text)
    return Rotary(size, parameters["rope_theta"], (0,) * (size // 2))


def patch_sizes(hf_config: Any) -> PatchSizes:
    """Return the sizes of the tower's input."""
    side = square_side(hf_config.vision_config.patch_size)
    return PatchSizes(side, 1, merge_size(hf_config))


def served_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of a config.json with which SGLang 0.5.23 serves transformers' form of the
    model, as Intern-S1, whose architecture is the same.

    SGLang would apply the dynamic scaling of the rotary embedding at all positions, where
    transformers applies it only beyond `max_position_embeddings`.
    """
    text = values["text_config"]
    rope = text.get("rope_parameters") or text
    return {
        "architectures": ["InternS1ForConditionalGeneration"],
        "text_config": {
            "architectures": [SERVED_LANGUAGE[text.get("model_type", "qwen2")]],
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta")},
        },
        "vision_config": {"dropout": 0.0, "drop_path_rate": 0.0, "initializer_factor": 1.0},
    }


def head_dim(text: Any) -> int:
    """Return the size of an attention head. text: transformers' text_config."""
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size


def merge_size(hf_config: Any) -> int:
    """Return the side in patches of the square that becomes one token."""
    return round(1 / hf_config.downsample_ratio)


def square_side(size: Any) -> int:
    """Return the side of a size that is a number, or a height and an equal width."""
    side: int = size if isinstance(size, int) else size[0]
    return side
