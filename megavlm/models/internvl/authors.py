"""The authors' form of InternVL3 and InternVL3.5 (`internvl_chat`), in which most releases come: a
config.json and names of tensors of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megavlm.models.common.mapping import Entry, same
from megavlm.models.internvl.config import SERVED_LANGUAGE
from megavlm.models.internvl.mapping import mapping as hf_mapping

# Tensors outside of blocks, by their names in transformers' form.
_NAMES = {
    "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
    "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
    "vision_tower.embeddings.patch_embeddings.projection.": (
        "vision_model.embeddings.patch_embedding."
    ),
    "multi_modal_projector.layer_norm.": "mlp1.0.",
    "multi_modal_projector.linear_1.": "mlp1.1.",
    "multi_modal_projector.linear_2.": "mlp1.3.",
}
# Parts of the names of a block's tensors.
_PARTS = {
    "vision_tower.encoder.layer.": "vision_model.encoder.layers.",
    ".attention.projection_layer.": ".attn.proj.",
    ".attention.": ".attn.",
    ".lambda_": ".ls",
    ".layernorm_before.": ".norm1.",
    ".layernorm_after.": ".norm2.",
}


def config_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of transformers' InternVLConfig for a config.json of the authors. Raises
    ValueError for settings that are not implemented.
    """
    text, vision = dict(values["llm_config"]), values["vision_config"]
    if text.get("model_type") not in SERVED_LANGUAGE:
        raise ValueError(
            f"llm_config.model_type: {text.get('model_type')!r} is not supported; use one of "
            f"{', '.join(SERVED_LANGUAGE)}."
        )
    if values.get("ps_version", "v1") != "v2":
        raise ValueError(
            f"ps_version: {values.get('ps_version', 'v1')!r} orders the patches of a token in "
            "another way, which is not supported; use v2."
        )
    return {
        "text_config": text,
        "vision_config": {
            "attention_bias": vision.get("qkv_bias", False),
            "hidden_act": vision.get("hidden_act", "gelu"),
            "hidden_size": vision["hidden_size"],
            "image_size": values.get("force_image_size") or vision["image_size"],
            "intermediate_size": vision["intermediate_size"],
            "layer_norm_eps": vision.get("layer_norm_eps", 1e-6),
            "layer_scale_init_value": vision.get("initializer_factor", 0.1),
            "norm_type": vision.get("norm_type", "rms_norm"),
            "num_attention_heads": vision["num_attention_heads"],
            "num_hidden_layers": vision["num_hidden_layers"],
            "patch_size": vision["patch_size"],
            "use_qk_norm": vision.get("qk_normalization", True),
        },
        "downsample_ratio": values.get("downsample_ratio", 0.5),
        "vision_feature_layer": values.get("select_layer", -1),
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor, by the authors' names. `config` is transformers'
    InternVLConfig.
    """
    return [*_renamed(hf_mapping(config))]


def _renamed(entries: list[Entry]) -> Iterator[Entry]:
    for entry in entries:
        names = tuple(_name(hf) for hf in entry.hf)
        if ".attn.q_proj." in names[0]:  # one tensor in the authors' files
            fused = names[0].replace(".q_proj.", ".qkv.")
            yield same(entry.megatron, fused, entry.megatron_shape)
        else:
            yield replace(entry, hf=names)


def _name(hf: str) -> str:
    for old, new in _NAMES.items():
        if hf.startswith(old):
            return new + hf.removeprefix(old)
    if hf.startswith("vision_tower."):
        for old, new in _PARTS.items():
            hf = hf.replace(old, new)
    return hf
