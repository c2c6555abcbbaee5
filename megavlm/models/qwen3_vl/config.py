"""Qwen3-VL's configuration, dense and MoE, as megatron-core's."""

from typing import Any

from megavlm.models.common.architecture import dense, rotary_parameters
from megavlm.models.common.rotary import MultimodalRotary, interleaved_axes

# transformers', for a configuration that does not say; of the released models.
MROPE_SECTION = (24, 20, 20)


def architecture(hf_config: Any) -> dict[str, Any]:
    """TransformerConfig's fields that describe the model. `hf_config`: transformers' Qwen3VLConfig
    or Qwen3VLMoeConfig.

    ValueError for what it says and we do not implement.
    """
    text = hf_config.text_config
    if text.attention_bias:
        raise ValueError("text_config.attention_bias: a bias is not supported in Qwen3-VL.")
    fields = dense(text, head_dim=text.head_dim, qkv_bias=False, qk_norm=True)
    layers = expert_layers(text)
    return fields | _experts(text, layers) if any(layers) else fields


def rotary(hf_config: Any) -> MultimodalRotary:
    text = hf_config.text_config
    theta, section = rotary_parameters(text, text.head_dim, MROPE_SECTION)
    return MultimodalRotary(text.head_dim, theta, interleaved_axes(section))


def expert_layers(text: Any) -> list[int]:
    """1 for each layer with experts, 0 for each dense one."""
    count = text.num_hidden_layers
    if not getattr(text, "num_experts", 0):
        return [0] * count
    dense_layers, step = set(text.mlp_only_layers), text.decoder_sparse_step
    return [int(index not in dense_layers and (index + 1) % step == 0) for index in range(count)]


def _experts(text: Any, layers: list[int]) -> dict[str, Any]:
    """The router's softmax over all experts, the largest taken and made to sum to 1, is the softmax
    over the largest.
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
        "num_moe_experts": text.num_experts,
        "moe_ffn_hidden_size": text.moe_intermediate_size,
        "moe_layer_freq": layers,
        "moe_router_topk": text.num_experts_per_tok,
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        # Balance was the pretraining's concern; a loss of its own would be no policy gradient.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
