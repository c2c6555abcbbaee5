"""Qwen2.5-VL's configuration as megatron-core's."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megavlm.models.common.architecture import dense, rotary_parameters
from megavlm.models.common.rotary import MultimodalRotary, chunked_axes
from megavlm.parallel.mesh import Mesh

# transformers', for a configuration that does not say; of the released models.
MROPE_SECTION = (16, 24, 24)


def transformer_config(
    hf_config: Any, mesh: Mesh, *, dtype: torch.dtype, sequence: bool
) -> TransformerConfig:
    """`hf_config`: transformers' Qwen2_5_VLConfig. `sequence`: sequence parallelism over the tensor
    axis.
    """
    text = hf_config.text_config
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=head_dim(hf_config),
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=text.initializer_range,
        tensor_model_parallel_size=mesh.tensor_size,
        sequence_parallel=sequence and mesh.tensor_size > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        # Losses come divided by their global denominator: gradients are summed, never averaged.
        calculate_per_token_loss=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def architecture(hf_config: Any) -> dict[str, Any]:
    """TransformerConfig's fields that describe the model, which are Qwen2-VL's too. `hf_config`:
    transformers' Qwen2_5_VLConfig or Qwen2VLConfig.

    ValueError for what it says and we do not implement.
    """
    text = hf_config.text_config
    return dense(text, head_dim=_head_dim(text), qkv_bias=True, qk_norm=False)


def rotary(hf_config: Any) -> MultimodalRotary:
    text = hf_config.text_config
    head_dim = _head_dim(text)
    theta, section = rotary_parameters(text, head_dim, MROPE_SECTION)
    return MultimodalRotary(head_dim, theta, chunked_axes(section))


def _head_dim(text: Any) -> int:
    return text.hidden_size // text.num_attention_heads


def head_dim(hf_config: Any) -> int:
    text = hf_config.text_config
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def tied_embeddings(hf_config: Any) -> bool:
    return bool(hf_config.tie_word_embeddings)
