"""EAGLE-3 draft head, for models that have no head of their own (Qwen2.5-VL, Qwen3-VL).

`fc` maps hidden states from several layers of the policy to one. The layer normalises this and the
token's embedding, and its attention reads both side by side; around them it is a dense layer of the
Llama family. Slots, trees and the loss are as in `draft_head`.

Source: EAGLE-3 (arXiv 2503.01840), SGLang 0.5.23 (models/llama_eagle3.py). Only the first draft of
a pass is trained: a server makes the second from the hidden state of the first.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn

from megavlm.models.common.config import LanguageConfig
from megavlm.models.common.draft_head import DraftHead
from megavlm.models.common.language import ChunkPlace, LayerKind, layer_spec, whole_norm
from megavlm.parallel import platform


class JoinedNorms(nn.Module):
    """Input norm of the head's layer: maps hidden states [t, 1, H] to normalised embeddings and
    hidden states side by side, [t, 1, 2H].

    embeddings: [t, 1, H], set before each call.
    """

    embeddings: Tensor

    def __init__(self, config: LanguageConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        norm = whole_norm()
        self.embedding_norm = norm(config, hidden_size, eps=eps)
        self.hidden_norm = norm(config, hidden_size, eps=eps)

    def forward(self, hidden: Tensor) -> Tensor:
        embeddings = self.embedding_norm(self.embeddings)
        del self.embeddings
        return torch.cat([embeddings, self.hidden_norm(hidden)], dim=-1)


class Eagle3Head(DraftHead):
    """EAGLE-3 draft head of a language model. The layer is dense, also in a model with experts."""

    @property
    def num_inputs(self) -> int:
        return len(self.config.captured_layers)

    def _build_layer(self, place: ChunkPlace, groups: ProcessGroupCollection) -> None:
        config = copy.copy(self.config)
        config.qk_layernorm = config.add_qkv_bias = False
        config.captured_layers = ()
        self.layer = build_module(
            _layer_spec(config, groups), config=config, pg_collection=groups, vp_stage=place.index
        )
        # Embeddings are no input that the recomputation of a norm would keep.
        self.layer.recompute_input_layernorm = False

    def _joined(self, states: Tensor, embeddings: Tensor) -> Tensor:
        self.layer.input_layernorm.embeddings = embeddings
        joined: Tensor = self.fc(states)
        return joined


def _layer_spec(config: LanguageConfig, groups: ProcessGroupCollection) -> ModuleSpec:
    layer = layer_spec(config, LayerKind(has_experts=False, is_linear=False), groups)
    parts = layer.submodules
    linear: Callable[..., Any] = ColumnParallelLinear
    if platform.has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        linear = TEColumnParallelLinear  # the layer's own is fused with a norm

    def wide(input_size: int, *sizes: int, **options: Any) -> Any:
        return linear(2 * input_size, *sizes, **options)

    parts.input_layernorm = JoinedNorms
    parts.self_attention.submodules.linear_qkv = wide
    parts.sharded_state_dict_keys_map.pop("input_layernorm.", None)
    return layer
