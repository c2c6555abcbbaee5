"""Tiny GLM-4.1V (dense, `glm4v`) and GLM-4.6V (MoE, `glm4v_moe`)."""

from collections.abc import Mapping
from typing import Any

from transformers import Glm4vConfig, Glm4vMoeConfig

from megavlm.models.common.tiny import (
    EXPERT_OPTIONS,
    TinyFamily,
    TinySizes,
    TinyTokens,
    mrope_section,
    text_values,
)
from megavlm.parallel.torchvision_ops import define_torchvision_operators

PARTIAL_ROTARY_FACTOR = 0.5  # of released models

# The released template without its first two tokens, tools and thoughts, to keep prompts short.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "<|begin_of_video|><|video|><|end_of_video|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TOKENS = TinyTokens(
    special=(
        "<|endoftext|>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|image|>",
        "<|video|>",
    ),
    end_of_text="<|endoftext|>",
    eos="<|endoftext|>",  # a turn ends by <|user|>
    chat_template=CHAT_TEMPLATE,
    roles=("\n",),
)


def _config(
    config_class: type[Any],
    text: dict[str, Any],
    sizes: TinySizes,
    vocab_size: int,
    ids: Mapping[str, int],
) -> Any:
    ends = [ids[token] for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    kinds = {f"{kind}_token_id": ids[f"<|{kind}|>"] for kind in ("image", "video")}
    marks = {
        f"{kind}_{end}_token_id": ids[f"<|{word}_of_{kind}|>"]
        for kind in ("image", "video")
        for end, word in (("start", "begin"), ("end", "end"))
    }
    return config_class(
        architectures=[config_class.__name__.replace("Config", "ForConditionalGeneration")],
        text_config={
            **text_values(sizes, vocab_size),
            **text,
            "eos_token_id": ends,
            "pad_token_id": ends[0],
        },
        vision_config={
            "depth": sizes.vision_depth,
            "hidden_size": sizes.vision_hidden_size,
            "intermediate_size": sizes.vision_ffn_size,
            "num_heads": sizes.vision_num_heads,
            "out_hidden_size": sizes.hidden_size,
            "image_size": 14 * (sizes.position_table_side or 8),
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "initializer_range": sizes.init_std,
        },
        tie_word_embeddings=sizes.tied_embeddings,
        **kinds,
        **marks,
    )


def _rotary(head_dim: int) -> dict[str, Any]:
    rotated = int(head_dim * PARTIAL_ROTARY_FACTOR)
    parameters = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": PARTIAL_ROTARY_FACTOR,
        "mrope_section": mrope_section(rotated),
    }
    return {"rope_parameters": parameters, "partial_rotary_factor": PARTIAL_ROTARY_FACTOR}


def _dense(sizes: TinySizes, vocab_size: int, ids: Mapping[str, int]) -> Any:
    text = _rotary(sizes.hidden_size // sizes.num_heads)
    return _config(Glm4vConfig, text, sizes, vocab_size, ids)


def _mixture(sizes: TinySizes, vocab_size: int, ids: Mapping[str, int]) -> Any:
    head_dim = sizes.head_dim or sizes.hidden_size // sizes.num_heads
    dense = [0] if sizes.dense_layers is None else list(sizes.dense_layers)
    if dense != list(range(len(dense))):
        raise ValueError(f"dense_layers: {dense} are not the first layers, as they must be")
    text = _rotary(head_dim) | {
        "head_dim": head_dim,
        "n_routed_experts": sizes.num_experts or 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": sizes.experts_per_token or 2,
        "moe_intermediate_size": sizes.expert_ffn_size,
        "first_k_dense_replace": len(dense),
        "routed_scaling_factor": 1.5,
    }
    return _config(Glm4vMoeConfig, text, sizes, vocab_size, ids)


def _processor(config: Any, tokenizer: Any, max_pixels: int | None) -> Any:
    """Return the processor of GLM-4.1V, or for the MoE model of GLM-4.6V. Their bounds count the
    pixels of both frames of a patch, and of all frames of a video.
    """
    define_torchvision_operators()
    from transformers import (
        Glm4vImageProcessor,
        Glm4vProcessor,
        Glm4vVideoProcessor,
        Glm46VImageProcessor,
        Glm46VProcessor,
        Glm46VVideoProcessor,
    )

    classes: tuple[Any, Any, Any] = (Glm4vImageProcessor, Glm4vVideoProcessor, Glm4vProcessor)
    if config.model_type == "glm4v_moe":
        classes = Glm46VImageProcessor, Glm46VVideoProcessor, Glm46VProcessor
    images, videos, processor = classes
    smallest, largest = 56**2, max_pixels or 1280 * 28**2
    size = {"shortest_edge": 2 * smallest, "longest_edge": 2 * largest}
    return processor(
        image_processor=images(size=size),
        tokenizer=tokenizer,
        video_processor=videos(size={**size, "longest_edge": 16 * largest}),
        chat_template=CHAT_TEMPLATE,
    )


TINY = {
    "glm4v": TinyFamily(
        options=frozenset({"position_table_side"}),
        tokens=TOKENS,
        config=_dense,
        processor=_processor,
    ),
    "glm4v_moe": TinyFamily(
        options=frozenset({"position_table_side", "head_dim", *EXPERT_OPTIONS}),
        tokens=TOKENS,
        config=_mixture,
        processor=_processor,
    ),
}
