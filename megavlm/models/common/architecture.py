"""Parts of the families' `config.py`: the sizes of a language model, its LanguageConfig fields and
its rotary embedding, as plain values. Configurations that are not implemented raise ValueError.

Nothing here imports torch, so that a recipe can be checked without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PatchSizes:
    """Sizes of a tower's input.

    side: Side of a patch in pixels.
    frames: Number of frames in a patch.
    merge: Side in patches of the square that becomes one token.
    """

    side: int
    frames: int
    merge: int


@dataclass(frozen=True)
class FolderNames:
    """Names under which the files of a model folder repeat values of its config.json.

    sizes: Names of values in vision_config, and their names in an image or video processor.
    tokens: Names of token ids in config.json, and these tokens in tokenizer.json.
    only_in_templates: Tokens that chat templates write and prompts do not keep, so that they need
        no row of the embedding.
    """

    sizes: Mapping[str, str]
    tokens: Mapping[str, str]
    only_in_templates: tuple[str, ...] = ()


def dense_sizes(text: Mapping[str, Any], *, head_dim: int | None) -> dict[str, Any]:
    """Return the sizes that layout rules need, without experts, under LanguageConfig's names.

    text: The language model's values in a config.json.
    head_dim: None uses the hidden size divided by the number of heads.

    Raises KeyError with the name of a missing value.
    """
    heads = count(text, "num_attention_heads")
    return {
        "num_layers": count(text, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_query_groups": count(text, "num_key_value_heads"),
        "ffn_hidden_size": count(text, "intermediate_size"),
        "kv_channels": head_dim or count(text, "hidden_size") // heads,
    }


def count(values: Mapping[str, Any], name: str) -> int:
    """Return an integer of a config.json. Raises KeyError with its name if it is missing."""
    value = values.get(name)
    if not isinstance(value, int):
        raise KeyError(name)
    return value


def expert_sizes(text: Mapping[str, Any], num_experts: str, layers: list[int]) -> dict[str, Any]:
    """Return the sizes of experts that layout rules need, under LanguageConfig's names.

    text: The language model's values in a config.json.
    num_experts: The key of the number of experts in `text`.
    layers: 1 for each layer with experts, 0 for each dense layer.

    Raises KeyError with the name of a missing value.
    """
    return {
        "num_moe_experts": count(text, num_experts),
        "moe_ffn_hidden_size": count(text, "moe_intermediate_size"),
        "moe_layer_freq": layers,
    }


def language_fields(
    text: Any, sizes: Mapping[str, Any], *, qkv_bias: bool, qk_norm: bool
) -> dict[str, Any]:
    """Return LanguageConfig's fields, including the router's if the model has experts.

    text: transformers' text_config.
    sizes: The result of the family's `language_sizes` for it.

    Raises ValueError for an activation, a kind of attention or a router that is not implemented.
    """
    if not qkv_bias and text.attention_bias:
        raise ValueError(
            "text_config.attention_bias: a bias is not supported in this family; set it to false."
        )
    if text.hidden_act != "silu":
        raise ValueError(
            f"text_config.hidden_act: {text.hidden_act!r} is not supported; use one of silu."
        )
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        raise ValueError(
            f"text_config: layers from {text.max_window_layers} on have a sliding window of "
            f"{text.sliding_window} tokens, but sliding windows are not supported; set "
            "use_sliding_window to false."
        )
    return {
        **sizes,
        **(_router(text) if "num_moe_experts" in sizes else {}),
        "hidden_size": text.hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": text.rms_norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        "init_method_std": text.initializer_range,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _router(text: Any) -> dict[str, Any]:
    """Return LanguageConfig's fields of a router. Raises ValueError for one that is not supported.

    HF takes the softmax over all experts, selects the largest weights and normalises them to sum
    to 1. This equals a softmax over the selected experts only (`moe_router_pre_softmax` False).
    """
    if not getattr(text, "norm_topk_prob", True):
        raise ValueError(
            "text_config.norm_topk_prob: routers whose weights do not sum to 1 are not supported."
        )
    if text.num_experts_per_tok == 1:
        raise ValueError(
            "text_config.num_experts_per_tok: 1 is not supported, since a single expert has weight "
            "1 and its router no gradient; use 2 or more."
        )
    return {
        "moe_router_topk": text.num_experts_per_tok,
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        # Load balancing belongs to pretraining; an auxiliary loss would bias the policy gradient.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


@dataclass(frozen=True)
class Rotary:
    """A multimodal rotary embedding (M-RoPE).

    axes: Position axis (0 time, 1 height, 2 width) of each of the head_dim / 2 frequencies.
    """

    head_dim: int
    theta: float
    axes: tuple[int, ...]


def rotary_parameters(
    text: Any, head_dim: int, default_section: Sequence[int]
) -> tuple[float, Sequence[int]]:
    """Return theta and mrope_section. Raises ValueError for a scaled embedding, or a section that
    does not fill the head.
    """
    parameters = text.rope_parameters
    if parameters["rope_type"] != "default":
        raise ValueError(
            f"text_config.rope_parameters: rope_type {parameters['rope_type']!r} is not supported; "
            "use default."
        )
    section = parameters.get("mrope_section", default_section)
    if sum(section) != head_dim // 2 or len(section) != 3:
        raise ValueError(
            f"text_config.rope_parameters: mrope_section {list(section)} does not give time, "
            f"height and width the {head_dim // 2} frequencies of a head of {head_dim}."
        )
    return parameters["rope_theta"], section


def chunked_axes(section: Sequence[int]) -> tuple[int, ...]:
    """Return the position axis of each rotary frequency in Qwen2-VL and Qwen2.5-VL.

    Source: `mrope_section` in the released configurations: runs of consecutive frequencies.
    """
    return tuple(axis for axis, frequencies in enumerate(section) for _ in range(frequencies))


def interleaved_axes(section: Sequence[int]) -> tuple[int, ...]:
    """Return the position axis of each rotary frequency in Qwen3-VL. The axes alternate, T H W T H
    W, until height and width have as many as `section` says; the remaining frequencies are time.

    Source: transformers `models/qwen3_vl/modeling_qwen3_vl.py`, `recomposition_frequencies`.
    """
    axes = [0] * sum(section)
    for axis in (1, 2):
        for frequency in range(axis, min(3 * section[axis], len(axes)), 3):
            axes[frequency] = axis
    return tuple(axes)
