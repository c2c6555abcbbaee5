"""Layer specs: Transformer Engine layers on a GPU, megatron-core's own on a CPU; tree attention,
DeepStack and one checkpoint form in both.
"""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megavlm.models.common.attention import TreeAttention
from megavlm.models.common.config import LanguageConfig
from megavlm.models.common.deepstack import DeepStackLayer
from megavlm.parallel import platform


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with megatron-core's constructor, and the mark by which its gradients are summed
    under sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def layer_specs(
    config: LanguageConfig, groups: ProcessGroupCollection, chunk: int | None
) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage, or of one chunk of it."""
    stage = groups.pp.rank()
    first = get_transformer_layer_offset(config, chunk, stage)
    count = get_num_layers_to_build(config, chunk, stage)
    is_moe = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    assert isinstance(is_moe, list), "a family names its expert layers one by one"
    specs = {kind: _layer_spec(config, bool(kind)) for kind in set(is_moe)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[kind] for kind in is_moe[first : first + count]],
        layer_norm=_final_norm(),
    )


# Keys of checkpoints say that a norm belongs to the linear after it, as where the two are fused.
NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
DENSE_NORM_KEYS = NORM_KEYS | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _layer_spec(config: LanguageConfig, has_experts: bool) -> ModuleSpec:
    experts = config.num_moe_experts if has_experts else None
    if platform.has_gpu():
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    else:
        layer = get_gpt_layer_local_spec(
            num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        parts.sharded_state_dict_keys_map = NORM_KEYS if has_experts else DENSE_NORM_KEYS
    layer.module = DeepStackLayer
    layer.submodules.self_attention.submodules.core_attention = TreeAttention
    return layer


def _final_norm() -> type | ModuleSpec:
    if not platform.has_gpu():
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
