"""The language model: megatron-core's GPTModel over packs, with positions given per token and
scores only at targets.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megavlm.models.common.attention import PackLayout, TreeAttention
from megavlm.models.common.rotary import MultimodalRotary
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


def layer_specs(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Transformer Engine layers on a GPU, megatron-core's own on a CPU; TreeAttention and one
    checkpoint form in both.
    """
    qk_layernorm = config.qk_layernorm
    if platform.has_gpu():
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm)
        final_norm = _transformer_engine_norm()
    else:
        layer = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm, normalization="RMSNorm")
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = final_norm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = TreeAttention
    return TransformerBlockSubmodules(
        layer_specs=[layer] * config.num_layers, layer_norm=final_norm
    )


def _transformer_engine_norm() -> type | ModuleSpec:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


class LanguageModel(GPTModel):
    """Embeds, runs the decoder and gathers the hidden states of a pack. [T, 1, H] in and out."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        max_sequence_length: int,
        tied_embeddings: bool,
        rotary: MultimodalRotary,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=layer_specs(config),
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            share_embeddings_and_output_weights=tied_embeddings,
            position_embedding_type="none",
            scatter_embedding_sequence_parallel=False,  # image features go in first
            pg_collection=groups,
        )
        self.rotary = rotary

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] to [T, 1, H], whole on every rank of the tensor axis."""
        return self.embedding(input_ids=token_ids[None], position_ids=None)

    def forward(self, embeddings: Tensor, positions: Tensor, layout: PackLayout) -> Tensor:
        """Final hidden states [T, H] on every rank; their gradient is summed over the tensor axis
        in backward.
        """
        tensor_group = self.pg_collection.tp
        if self.config.sequence_parallel:
            embeddings = scatter_to_sequence_parallel_region(embeddings, group=tensor_group)
        hidden = self.decoder(
            hidden_states=embeddings,
            attention_mask=None,
            rotary_pos_emb=self.rotary(positions),
            packed_seq_params=layout,
        )
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=tensor_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=tensor_group)
        return hidden.squeeze(1)

    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer [V/tp, H]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
