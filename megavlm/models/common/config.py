"""Options of a model, and megatron-core's configuration of a family under a layout."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megavlm.config.schema import Config
from megavlm.parallel import platform
from megavlm.parallel.mesh import Layout


@dataclass
class LanguageConfig(TransformerConfig):
    """megatron-core's configuration with the fields that this model adds.

    tree_attention: Backend of the core attention (`attention_backends`).
    deepstack_levels: Number of levels of tower features that are added to the hidden states, one
        level after each of the first layers.
    post_norms: Each layer normalises the outputs of its attention and of its MLP, before it adds
        them to the hidden states.
    router_bias: A layer's router adds a bias of its own to the scores of experts where it selects
        them, and not where it weighs them. The bias is not trained: it balances the load of
        experts in pretraining.
    fused_gate_up: HF has the gate and the up projection of a dense MLP in one linear layer with
        one adapter.
    fused_weight_gradients: Transformer Engine's linear layers add weight gradients to `main_grad`
        within the matrix product.
    draft_head: The last stage has a draft head (`draft_head`), to which other stages pass the
        embeddings on.
    captured_layers: Layers, from 0 and ascending, whose input hidden states are the input of an
        EAGLE-3 draft head. Empty without one.
    """

    tree_attention: str = "sdpa"
    deepstack_levels: int = 0
    post_norms: bool = False
    router_bias: bool = False
    fused_gate_up: bool = False
    fused_weight_gradients: bool = False
    draft_head: bool = False
    captured_layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a model that are not part of its architecture or layout.

    sequence: Use sequence parallelism over the tensor axis.
    recompute: Activations of the language model that the backward pass recomputes. "selective"
        recomputes `recompute_modules` (megatron-core's names), "full" everything between the
        inputs of every `recompute_layers` layers.
    first_stage_layers, last_stage_layers: Number of language layers on these pipeline stages; None
        splits layers evenly.
    fusions: On a GPU, use fused kernels (`model.fusions`).
    head: Outputs of the last stage. A separate critic has "values", a policy with a shared critic
        has "both".
    draft_head: The last stage also has the draft head, and trains it (`speculation.train`).
    """

    dtype: torch.dtype = torch.float32
    sequence: bool = False
    attention: str = "sdpa"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    recompute_layers: int = 1
    recompute_tower: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    freeze_tower: bool = True
    freeze_merger: bool = True
    fusions: bool = True
    head: Literal["tokens", "values", "both"] = "tokens"
    draft_head: bool = False

    @classmethod
    def from_config(cls, config: Config) -> "ModelOptions":
        """Return the options of a recipe; "auto" attention is resolved for this machine."""
        model, parallel, recompute = config.model, config.parallel, config.recompute
        attention: str = model.attention
        if attention == "auto":
            # flash kernels support half precision only
            flash = platform.has_gpu() and model.dtype == "bfloat16"
            attention = "flash" if flash else "sdpa"
        return cls(
            dtype=getattr(torch, model.dtype),
            sequence=parallel.sequence,
            attention=attention,
            recompute=recompute.language,
            recompute_modules=recompute.modules,
            recompute_layers=recompute.layers,
            recompute_tower=recompute.tower,
            first_stage_layers=parallel.first_stage_layers,
            last_stage_layers=parallel.last_stage_layers,
            freeze_tower=model.freeze_tower,
            freeze_merger=model.freeze_merger,
            fusions=model.fusions,
            draft_head=config.speculation.train,
        )


def language_config(
    architecture: dict[str, Any], layout: Layout, options: ModelOptions
) -> LanguageConfig:
    """Return megatron-core's configuration for an architecture (the result of a family's
    `architecture(hf_config)`), a layout and options.
    """
    virtual = layout.virtual if layout.virtual > 1 else None
    has_experts = "num_moe_experts" in architecture
    fused = options.fusions and platform.has_gpu()
    engine = platform.has_transformer_engine()
    return LanguageConfig(
        **architecture,
        activation_func=F.silu,
        gated_linear_unit=True,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=options.sequence and layout.tensor > 1,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=options.first_stage_layers,
        num_layers_in_last_pipeline_stage=options.last_stage_layers,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        tree_attention=options.attention,
        **_recompute(options),
        # Packs differ in length, so pipeline stages also send the shape.
        variable_seq_lengths=layout.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # noqa: S106  # variable lengths need it
        # Virtual stages without overlap give wrong gradients in megatron-core 0.16.1.
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        # On gloo with overlap, deallocation would corrupt outputs that are still being sent.
        deallocate_pipeline_outputs=platform.has_gpu(),
        moe_grouped_gemm=has_experts and engine,
        cuda_graph_scope=[],
        attention_softmax_in_fp32=True,
        # Losses are already divided by their global denominator, so gradients are summed and never
        # averaged.
        calculate_per_token_loss=True,
        bias_activation_fusion=fused,  # SwiGLU; it keeps only its input for the backward pass
        # Angles are given per token, and megatron-core does not treat PackLayout as "thd". So the
        # kernel uses the angles unchanged, M-RoPE's too.
        apply_rope_fusion=fused and engine,
        moe_permute_fusion=fused and engine and has_experts,
        fused_weight_gradients=fused and engine,
        draft_head=options.draft_head,
        # This is for megatron-core's own linear layers, and needs apex. Only the output layer is
        # one, and its product is computed in chunks (`token_scores`).
        gradient_accumulation_fusion=False,
        # There is no dropout, no bias to add, no softmax outside of tree attention, and no apex
        # norm. megatron-core's fused cross-entropy would need all logits at once.
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
    )


def _recompute(options: ModelOptions) -> dict[str, Any]:
    if options.recompute == "none":
        return {}
    if options.recompute == "selective":
        modules = list(options.recompute_modules)
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": options.recompute_layers,
    }
