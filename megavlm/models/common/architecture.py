"""What the families' language models have in common, as megatron-core's configuration; and refusal
of what transformers' configurations can say and we do not implement.
"""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F

ACTIVATIONS = {"silu": F.silu}


def dense(text: Any, *, head_dim: int, qkv_bias: bool, qk_norm: bool) -> dict[str, Any]:
    """TransformerConfig's fields for a model without experts. `text`: transformers' text_config.

    ValueError for an activation or a kind of attention that we do not implement.
    """
    if text.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"text_config.hidden_act: {text.hidden_act!r} is not supported; "
            f"use one of {', '.join(ACTIVATIONS)}."
        )
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        raise ValueError(
            f"text_config: layers from {text.max_window_layers} on have a sliding window of "
            f"{text.sliding_window} tokens, which is not supported; set use_sliding_window to "
            "false."
        )
    return {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "ffn_hidden_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": text.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": ACTIVATIONS[text.hidden_act],
        "add_bias_linear": False,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        "init_method_std": text.initializer_range,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def rotary_parameters(
    text: Any, head_dim: int, default_section: Sequence[int]
) -> tuple[float, Sequence[int]]:
    """theta and mrope_section. ValueError for a scaled embedding, or a section that does not fill
    the head.
    """
    parameters = text.rope_parameters
    if parameters["rope_type"] not in ("default", "mrope"):
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
