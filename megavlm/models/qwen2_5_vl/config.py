"""Qwen2.5-VL's configuration as megatron-core's."""

from typing import Any

from megavlm.models.common.architecture import dense, rotary_parameters
from megavlm.models.common.rotary import MultimodalRotary, chunked_axes

# transformers', for a configuration that does not say; of the released models.
MROPE_SECTION = (16, 24, 24)


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
