"""Configurations and inputs of the GPU kit: tiny models, and released widths with few layers.

With MEGAVLM_GPU_TESTS=tiny all of them are tiny, and the kit runs on a CPU.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megavlm.data.packs.trees import Tree, prompt_tree
from megavlm.data.processor import ProcessedImage, Prompt
from megavlm.data.rows import Row
from megavlm.families import family as family_of
from megavlm.model_config import trained_config
from megavlm.models.common.tiny import TinySizes, tiny_config, tiny_family
from tests.support.random_images import random_image
from tests.support.releases import RELEASES, released_config

SWITCH = "MEGAVLM_GPU_TESTS"
TINY_VOCABULARY = 512
TINY_SPECIAL = 16  # ids from here on are words of a tiny vocabulary

# Released models by family; of the tiny ones, sizes that their kernels on a GPU can have.
WIDE: Mapping[str, str] = {
    "qwen2_vl": "Qwen2-VL-2B",
    "qwen2_5_vl": "Qwen2.5-VL-3B",
    "qwen3_vl": "Qwen3-VL-2B",
    "qwen3_vl_moe": "Qwen3-VL-30B-A3B",
    "qwen3_5": "Qwen3.5-4B",
    "qwen3_5_moe": "Qwen3.5-35B-A3B",
    "glm4v": "GLM-4.1V-9B-Thinking",
    "glm4v_moe": "GLM-4.6V",
    "internvl": "InternVL3_5-8B-HF",
    "minicpmv4_6": "MiniCPM-V-4.6",
    "qwen3_omni_moe": "Qwen3-Omni-30B-A3B",
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {},
    "qwen2_5_vl": {"full_attention_blocks": [1]},
    "qwen3_vl": {"head_dim": 32},
    "qwen3_vl_moe": {"head_dim": 32},
    "qwen3_5": {"num_layers": 4},
    "qwen3_5_moe": {"num_layers": 4},
    "glm4v": {"vision_hidden_size": 128},
    "glm4v_moe": {"vision_hidden_size": 128, "head_dim": 32},
    "internvl": {"position_table_side": 8},
    "minicpmv4_6": {"num_layers": 4},
    "qwen3_omni_moe": {"head_dim": 32},
}
FAMILIES = tuple(WIDE)
EXPERTS = 32  # of a wide layer; the released number would fill the GPU with one model


@dataclass(frozen=True)
class Shape:
    """Sizes of a pack. side: patches along an image's side. text: tokens of the question. answers:
    number and tokens of a prompt's answers. trees: prompts.
    """

    side: int
    text: int
    answers: tuple[int, int]
    trees: int


def is_tiny() -> bool:
    return os.environ.get(SWITCH) == "tiny"


def parity_shape(level: str) -> Shape:
    return Shape(8, 60, (4, 64), 1) if level == "tiny" else Shape(32, 140, (4, 100), 1)


def update_shape() -> Shape:
    return Shape(8, 12, (4, 9), 2) if is_tiny() else Shape(64, 140, (4, 256), 2)


def parity_config(family: str, level: str) -> Any:
    """Return transformers' configuration of a family, `tiny` or `wide`."""
    if level == "tiny":
        sizes = {"num_layers": 2, "vision_depth": 3, "tied_embeddings": True, **TINY[family]}
        ids = {token: i for i, token in enumerate(tiny_family(family).tokens.special)}
        config = tiny_config(family, TinySizes(**sizes), TINY_VOCABULARY, ids)
        return trained_config(config)
    config = config_of(WIDE[family], num_layers=4, vision_depth=4)
    for name in ("num_experts", "n_routed_experts"):
        if hasattr(config.text_config, name):
            setattr(config.text_config, name, EXPERTS)
    return config


def config_of(release: str, num_layers: int | None = None, vision_depth: int | None = None) -> Any:
    """Return transformers' configuration of a release, cut after its first layers; a tiny one of
    its family on a CPU.
    """
    if is_tiny():
        family = RELEASES[release]["model_type"]
        return parity_config(family, "tiny")
    with tempfile.TemporaryDirectory() as folder:
        config = released_config(release, Path(folder))
    _cut(config, num_layers, vision_depth)
    return config


def _cut(config: Any, num_layers: int | None, vision_depth: int | None) -> None:
    text, vision = config.text_config, config.vision_config
    depth = "depth" if hasattr(vision, "depth") else "num_hidden_layers"
    if num_layers is not None:
        text.num_hidden_layers = num_layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:num_layers]
    if vision_depth is not None:
        setattr(vision, depth, vision_depth)
        for name in ("fullatt_block_indexes", "deepstack_visual_indexes"):
            blocks = getattr(vision, name, None)
            if blocks:  # as many as before, in the blocks that are left
                setattr(vision, name, list(range(vision_depth))[-len(blocks) :])
        if hasattr(vision, "insert_layer_id"):  # a merger behind this block
            vision.insert_layer_id = vision_depth // 2 - 1


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
    given, grid = family_of(config.model_type), (1, shape.side, shape.side)
    sizes = given.patch_sizes(config)
    # Qwen's names and GLM's; other families have no such tokens in their configuration.
    marks = [
        token
        for kind in ("vision", "image")
        for mark in ("start", "end")
        if (token := getattr(config, f"{kind}_{mark}_token_id", None)) is not None
    ]
    # Words come before the special tokens of a released vocabulary, and after those of a tiny one.
    first = min(*marks, config.image_token_id, config.text_config.vocab_size)
    words = (0, first) if first > TINY_SPECIAL else (TINY_SPECIAL, config.text_config.vocab_size)
    text = torch.randint(*words, (shape.text,), generator=generator)
    tokens = [config.image_token_id] * (shape.side // sizes.merge) ** 2
    shown = [*marks[:1], *tokens, *marks[1:]]
    ids = torch.cat([torch.tensor(shown), text])
    image = random_image(key, sizes, grid, generator)
    positions, following = given.positions(config)(ids, (image,))
    row = Row(0, "", "", (), "", "")
    prompt = Prompt(row, ids, tuple(ids.tolist()), positions, following, (image,))
    answers = torch.randint(*words, shape.answers, generator=generator)
    return prompt, answers.tolist()
