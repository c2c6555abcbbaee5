"""Language model: one stage of megatron-core's GPTModel over packs, with positions given per token.

The layers are Transformer Engine's on a GPU where it is installed, and megatron-core's own
elsewhere. Both have tree attention, DeepStack and the same checkpoint keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
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
from torch import Tensor, nn

from megavlm.models.common.architecture import Rotary
from megavlm.models.common.attention import GatedSelfAttention, TreeAttention
from megavlm.models.common.config import LanguageConfig
from megavlm.models.common.deepstack import DeepStackLayer
from megavlm.models.common.pack_layout import PackLayout
from megavlm.models.common.rotary import MultimodalRotary
from megavlm.models.common.routing_replay import ExpertsSpec
from megavlm.models.linear_attention.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
)
from megavlm.parallel import platform


@dataclass(frozen=True)
class ChunkPlace:
    """Place of a chunk of layers in the pipeline.

    is_first, is_last: Whether the chunk is the first or the last one of the whole model.
    index: Index of the chunk in its stage, None if the stage has only one chunk.
    """

    is_first: bool
    is_last: bool
    index: int | None = None


class LanguageModel(GPTModel):
    """Layers of a pipeline stage, or of one chunk of it. The first chunk of the model also has the
    embedding, the last one the final norm and the output layer.
    """

    def __init__(
        self,
        config: LanguageConfig,
        hf_config: Any,
        place: ChunkPlace,
        *,
        rotary: Rotary,
        groups: ProcessGroupCollection,
        has_output: bool,
    ) -> None:
        """Build the chunk at `place`.

        hf_config: transformers' configuration.
        has_output: False for a separate critic; its last stage has no output layer.
        """
        super().__init__(
            config=config,
            transformer_layer_spec=layer_specs(config, groups, place.index),
            vocab_size=hf_config.text_config.vocab_size,
            max_sequence_length=hf_config.text_config.max_position_embeddings,
            pre_process=place.is_first,
            post_process=place.is_last,
            share_embeddings_and_output_weights=(
                bool(hf_config.tie_word_embeddings) and has_output
            ),
            position_embedding_type="none",
            scatter_embedding_sequence_parallel=False,  # image features must be inserted first
            pg_collection=groups,
            vp_stage=place.index,
        )
        for module in self.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):  # Transformer Engine's linears
                module.fuse_wgrad_accumulation = config.fused_weight_gradients
        self.rotary = MultimodalRotary(rotary, interleaved=config.rotary_interleaved)
        if place.is_last and not has_output:
            del self.output_layer
            self.post_process = False  # tells GPTModel that there is no output layer to save

    @property
    def first_layer(self) -> int:
        """Index of this chunk's first layer in the whole model."""
        return self.decoder.layers[0].layer_number - 1

    @property
    def next_layer(self) -> int:
        """Index of the layer that follows this chunk's last layer."""
        return self.decoder.layers[-1].layer_number

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [t, 1, H] of token ids [t], in full on every tensor rank."""
        return self.embedding(input_ids=token_ids[None], position_ids=None)

    def forward(
        self, hidden: Tensor, levels: Tensor | None, positions: Tensor, layout: PackLayout
    ) -> Tensor:
        """Run hidden states [t, 1, H] ([t / tp, 1, H] with sequence parallelism) through this
        chunk's layers. Returns the same shape.

        levels: DeepStack features for this chunk's layers and later ones (`deepstack`).
        positions: [3, t]
        """
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # A recomputed region has gradients only if one of its inputs requires them. With
            # adapters on a frozen embedding, no input would.
            hidden = hidden.detach().requires_grad_()
        angles = None
        if self.config.apply_rope_fusion:
            angles = self.rotary(positions)
        else:
            layout.rotary = self.rotary.tables(positions, hidden.dtype)
        self.decoder.set_input_tensor(hidden)
        return self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            context=levels,
            rotary_pos_emb=angles,
            packed_seq_params=layout,
        )

    def output_weight(self) -> Tensor:
        """Return this rank's rows of the output layer [V/tp, H]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class MegatronRMSNorm(nn.RMSNorm):
    """RMSNorm with megatron-core's constructor, and with the attribute that makes megatron-core sum
    its gradients under sequence parallelism. A zero-centred norm multiplies by 1 + weight, in fp32.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centred = config.layernorm_zero_centered_gamma
        if self.zero_centred:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centred:
            return super().forward(x)
        weight = 1 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


class NormedSum(nn.Module):
    """Sum of hidden states and the normalised output of attention or MLP, with the contract of
    megatron-core's "bias-dropout-add": a call returns the function that adds.
    """

    def __init__(self, config: LanguageConfig, norm: type) -> None:
        super().__init__()
        self.layernorm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self._add

    def _add(
        self, output_with_bias: tuple[Tensor, Tensor | None], hidden: Tensor, dropout: float
    ) -> Tensor:
        output, bias = output_with_bias
        assert bias is None and dropout == 0
        return hidden + self.layernorm(output)


def layer_specs(
    config: LanguageConfig, groups: ProcessGroupCollection, chunk: int | None
) -> TransformerBlockSubmodules:
    """Return the specs of this rank's pipeline stage, or of one chunk of it."""
    stage = groups.pp.rank()
    first = get_transformer_layer_offset(config, chunk, stage)
    count = get_num_layers_to_build(config, chunk, stage)
    kinds = layer_kinds(config)
    specs = {kind: layer_spec(config, kind, groups) for kind in set(kinds)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[kind] for kind in kinds[first : first + count]],
        layer_norm=whole_norm(),
    )


class LayerKind(NamedTuple):
    """Kind of a layer: whether it has experts, and whether it has Gated DeltaNet instead of
    attention (`is_linear`).
    """

    has_experts: bool
    is_linear: bool


def layer_kinds(config: TransformerConfig) -> list[LayerKind]:
    """Return the kind of each layer of the whole model."""
    none = [0] * config.num_layers
    experts = config.moe_layer_freq if config.num_moe_experts else none
    linear = config.linear_attention_freq or none
    assert isinstance(experts, list) and isinstance(linear, list), "a family names its layers"
    return [LayerKind(bool(x), bool(y)) for x, y in zip(experts, linear, strict=True)]


def layer_spec(
    config: LanguageConfig, kind: LayerKind, groups: ProcessGroupCollection
) -> ModuleSpec:
    experts = config.num_moe_experts if kind.has_experts else None
    if platform.has_transformer_engine():
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
        parts.input_layernorm = parts.pre_mlp_layernorm = MegatronRMSNorm
        if config.qk_layernorm:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = MegatronRMSNorm
        parts.sharded_state_dict_keys_map = _norm_keys(kind)
    layer.module = DeepStackLayer
    if config.post_norms:
        add = ModuleSpec(NormedSum, params={"config": config, "norm": whole_norm()})
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add
        layer.submodules.sharded_state_dict_keys_map |= {
            "self_attn_bda.": "self_attention.post_",
            "mlp_bda.": "mlp.post_",
        }
    if kind.has_experts:
        layer.submodules.mlp = ExpertsSpec.of(layer.submodules.mlp, groups)
    attention = layer.submodules.self_attention
    attention.submodules.core_attention = TreeAttention
    if config.attention_output_gate:
        attention.module = GatedSelfAttention
    if kind.is_linear:
        linears = attention.submodules
        layer.submodules.self_attention = ModuleSpec(
            module=GatedDeltaNet,
            submodules=GatedDeltaNetSubmodules(linears.linear_qkv, linears.linear_proj),
        )
    return layer


def _norm_keys(kind: LayerKind) -> dict[str, str]:
    """Return the map from names of norms to their checkpoint keys. In the keys a norm belongs to
    the linear layer after it, as in Transformer Engine's layers, where the two are fused.
    """
    linear = "in_proj" if kind.is_linear else "linear_qkv"
    keys = {"input_layernorm.": f"self_attention.{linear}.layer_norm_"}
    return keys if kind.has_experts else keys | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def whole_norm() -> type:
    """Return the class of norms that are not fused with a linear layer."""
    if not platform.has_transformer_engine():
        return MegatronRMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
