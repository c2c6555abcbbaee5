"""Parts of the Qwen families' tiny models."""

from collections.abc import Callable, Mapping
from typing import Any

from megavlm.models.common.tiny import (
    TinyFamily,
    TinySizes,
    TinyTokens,
    mrope_section,
    text_values,
    turns_template,
)
from megavlm.parallel.torchvision_ops import define_torchvision_operators

Sections = tuple[dict[str, Any], dict[str, Any]]  # of text_config and vision_config

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

# This is Qwen2.5-VL's released template without the default system message, to keep prompts short.
CHAT_TEMPLATE = turns_template(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
)
TOKENS = TinyTokens(
    special=(
        END_OF_TEXT,
        "<|im_start|>",
        END_OF_TURN,
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    end_of_text=END_OF_TEXT,
    eos=END_OF_TURN,
    chat_template=CHAT_TEMPLATE,
    roles=("system\n", "user\n", "assistant\n"),
)


def qwen_family(
    config_class: type[Any],
    sections: Callable[[TinySizes], Sections],
    options: tuple[str, ...] = (),
    **forms: bool,
) -> TinyFamily:
    """Return a family's parts.

    sections: Returns the values of text_config and vision_config that are the family's own.
    options: Names of its options. forms: Further fields of TinyFamily.
    """

    def config(sizes: TinySizes, vocab_size: int, token_ids: Mapping[str, int]) -> Any:
        text, vision = sections(sizes)
        return config_class(
            architectures=[config_class.__name__.replace("Config", "ForConditionalGeneration")],
            text_config=text | qwen_text(sizes, vocab_size, token_ids),
            vision_config=vision | qwen_vision(sizes),
            image_token_id=token_ids["<|image_pad|>"],
            video_token_id=token_ids["<|video_pad|>"],
            vision_start_token_id=token_ids["<|vision_start|>"],
            vision_end_token_id=token_ids["<|vision_end|>"],
            tie_word_embeddings=sizes.tied_embeddings,
        )

    return TinyFamily(
        options=frozenset(options), tokens=TOKENS, config=config, processor=_processor, **forms
    )


def qwen_text(sizes: TinySizes, vocab_size: int, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the values of a text_config that all models with a language model of Qwen share."""
    return text_values(sizes, vocab_size) | {
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[END_OF_TURN],
        "pad_token_id": ids[END_OF_TEXT],
    }


def qwen_vision(sizes: TinySizes) -> dict[str, Any]:
    """Return the values of a vision_config that the Qwen families share."""
    return {
        "depth": sizes.vision_depth,
        "num_heads": sizes.vision_num_heads,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": sizes.init_std,
    }


def qwen2_text(sizes: TinySizes) -> dict[str, Any]:
    """Return values of the text_config of Qwen2-VL and Qwen2.5-VL."""
    return {
        "rope_parameters": {
            "rope_type": "default",
            "type": "default",
            "rope_theta": 1e6,
            "mrope_section": mrope_section(sizes.hidden_size // sizes.num_heads),
        }
    }


def _processor(config: Any, tokenizer: Any, max_pixels: int | None) -> Any:
    define_torchvision_operators()
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    factor = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    bounds = {"min_pixels": (2 * factor) ** 2, "max_pixels": max_pixels or 1280 * factor**2}
    processor_class: Any = PROCESSOR_MAPPING[type(config)]
    if processor_class is Qwen3VLProcessor:
        half = [0.5] * 3
        images = Qwen2VLImageProcessor(**bounds, patch_size=16, image_mean=half, image_std=half)
        # The limits of a video count the pixels of all its frames.
        size = {"shortest_edge": bounds["min_pixels"], "longest_edge": 16 * bounds["max_pixels"]}
        videos: Any = Qwen3VLVideoProcessor(size=size, cap_pixels_per_frame=False)
    else:
        images = Qwen2VLImageProcessor(**bounds)
        videos = Qwen2VLVideoProcessor(**bounds)
    return processor_class(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=videos,
        chat_template=CHAT_TEMPLATE,
    )
