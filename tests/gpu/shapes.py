"""Models and inputs of the GPU tests: the shapes of Qwen2.5-VL-3B and Qwen3-VL-2B with random
weights, and tiny ones with which the same code runs on a CPU (MEGAVLM_GPU_TESTS=tiny).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megavlm.data.packing import Tree, prompt_tree
from megavlm.data.positions import Span, mrope_positions
from megavlm.data.processor import ProcessedImage, Prompt
from megavlm.data.rows import Row
from megavlm.demo.tiny_configs import TinySizes, tiny_config
from tests.random_images import random_image

SWITCH = "MEGAVLM_GPU_TESTS"
TOKENS = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TOKEN_IDS = {token: i for i, token in enumerate((*TOKENS, "<|video_pad|>"))}

# As published (tests/unit/models/releases.py).
RELEASED: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {
        "hidden_size": 2048,
        "num_layers": 36,
        "ffn_size": 11008,
        "num_heads": 16,
        "num_kv_heads": 2,
        "tied_embeddings": True,
        "vision_depth": 32,
        "vision_hidden_size": 1280,
        "vision_ffn_size": 3420,
        "vision_num_heads": 16,
        "full_attention_blocks": [7, 15, 23, 31],
    },
    "qwen3_vl": {
        "hidden_size": 2048,
        "num_layers": 28,
        "ffn_size": 6144,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "tied_embeddings": True,
        "vision_depth": 24,
        "vision_hidden_size": 1024,
        "vision_ffn_size": 4096,
        "vision_num_heads": 16,
        "deepstack_blocks": [5, 11, 17],
        "position_table_side": 48,
    },
}
NAMES = {"qwen2_5_vl": "Qwen2.5-VL-3B", "qwen3_vl": "Qwen3-VL-2B"}


@dataclass(frozen=True)
class Shape:
    """Sizes of a measurement. side: patches of an image's side. text: tokens of the question.
    answers: number and tokens of a prompt's. trees: prompts of a pack.
    """

    vocabulary: int
    side: int
    text: int
    answers: tuple[int, int]
    trees: int


def is_tiny() -> bool:
    return os.environ.get(SWITCH) == "tiny"


def sizes(family: str) -> dict[str, Any]:
    """Return the fields of TinySizes."""
    if not is_tiny():
        return dict(RELEASED[family])
    extra = {"full_attention_blocks": [1]} if family == "qwen2_5_vl" else {"head_dim": 32}
    return {"num_layers": 2, "vision_depth": 3, "tied_embeddings": True, **extra}


def parity_shape() -> Shape:
    return Shape(512, 8, 60, (4, 64), 1) if is_tiny() else Shape(151936, 32, 140, (4, 100), 1)


def update_shape() -> Shape:
    return Shape(512, 8, 12, (4, 9), 2) if is_tiny() else Shape(151936, 64, 140, (4, 256), 3)


def model_config(family: str, shape: Shape) -> Any:
    """Return transformers' configuration."""
    return tiny_config(family, TinySizes(**sizes(family)), shape.vocabulary, TOKEN_IDS)


def inputs(config: Any, shape: Shape) -> tuple[list[Tree], dict[str, ProcessedImage]]:
    """Return trees of random tokens, each with an image of its own, and the images by key."""
    generator = torch.Generator().manual_seed(1)
    pairs = [_prompt(config, shape, f"image {i}", generator) for i in range(shape.trees)]
    images = {image.key: image for prompt, _ in pairs for image in prompt.images}
    return [prompt_tree(prompt, answers) for prompt, answers in pairs], images


def prompt_of(config: Any, shape: Shape) -> tuple[Prompt, list[list[int]]]:
    """Return the first prompt of `inputs`, and its answers."""
    return _prompt(config, shape, "image 0", torch.Generator().manual_seed(1))


def _prompt(
    config: Any, shape: Shape, key: str, generator: torch.Generator
) -> tuple[Prompt, list[list[int]]]:
    vision, grid = config.vision_config, (1, shape.side, shape.side)
    merge = vision.spatial_merge_size
    words = torch.randint(len(TOKEN_IDS), shape.vocabulary, (shape.text,), generator=generator)
    start, end = config.vision_start_token_id, TOKEN_IDS["<|vision_end|>"]
    shown = [start, *[config.image_token_id] * (shape.side // merge) ** 2, end]
    ids = torch.cat([torch.tensor(shown), words])
    positions, following = mrope_positions(
        ids, [Span(grid)], vision_token_ids=[config.image_token_id], merge_size=merge
    )
    image = random_image(key, vision, grid, generator)
    row = Row(0, "", "", (), "", "")
    prompt = Prompt(row, ids, tuple(ids.tolist()), positions, following, (image,))
    count, length = shape.answers
    answers = torch.randint(len(TOKEN_IDS), shape.vocabulary, (count, length), generator=generator)
    return prompt, answers.tolist()
