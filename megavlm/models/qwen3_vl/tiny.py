"""Tiny Qwen3-VL, dense and MoE."""

from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

from megavlm.models.common.qwen_tiny import Sections, qwen_family
from megavlm.models.common.tiny import EXPERT_OPTIONS, TinySizes, interleaved_mrope_section


def _dense(sizes: TinySizes) -> Sections:
    head_dim = sizes.head_dim or sizes.hidden_size // sizes.num_heads
    text = {
        "head_dim": head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": interleaved_mrope_section(head_dim),
            "mrope_interleaved": True,
        },
    }
    blocks = sizes.deepstack_blocks
    if blocks is None:
        blocks = range(min(3, sizes.vision_depth, sizes.num_layers))
    vision = {
        "hidden_size": sizes.vision_hidden_size,
        "intermediate_size": sizes.vision_ffn_size,
        "out_hidden_size": sizes.hidden_size,
        "deepstack_visual_indexes": list(blocks),
        "num_position_embeddings": (sizes.position_table_side or 8) ** 2,
        "patch_size": 16,
    }
    return text, vision


def mixture(sizes: TinySizes) -> Sections:
    """Return the values of a mixture's text_config and vision_config that are the family's own."""
    text, vision = _dense(sizes)
    text |= {
        "num_experts": sizes.num_experts or 4,
        "num_experts_per_tok": sizes.experts_per_token or 2,
        "moe_intermediate_size": sizes.expert_ffn_size,
        "mlp_only_layers": list(sizes.dense_layers or ()),
        "decoder_sparse_step": 1,
    }
    return text, vision


def _stacked_mixture(sizes: TinySizes) -> Sections:
    ffn = sizes.expert_ffn_size
    if sizes.hidden_size in (ffn, 2 * ffn):
        raise ValueError(
            f"moe_ffn_size: {ffn} makes an expert tensor square under hidden_size "
            f"{sizes.hidden_size}, but transformers decides by its shape whether to transpose it"
        )
    return mixture(sizes)


OPTIONS = ("head_dim", "deepstack_blocks", "position_table_side")
TINY = {
    "qwen3_vl": qwen_family(Qwen3VLConfig, _dense, OPTIONS),
    "qwen3_vl_moe": qwen_family(
        Qwen3VLMoeConfig, _stacked_mixture, (*OPTIONS, *EXPERT_OPTIONS), transposes_experts=True
    ),
}
