"""Modelled cost of a tree: each family's matrices, the prompt once, attention by ancestors."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from megavlm.data.media.audio import ProcessedAudio
from megavlm.data.packs.trees import Segment, Tree
from megavlm.models.cost import ModelCost
from megavlm.models.qwen3_omni.config import count_tokens
from tests.support.families import (
    FAMILIES,
    build_in_transformers,
    entries_of,
    part,
    small_config,
)
from tests.support.trees import image, segment, tree

COST = ModelCost(per_token=1000.0, per_pair=10.0, per_patch=100.0, per_patch_pair=1.0)


BLOCK = r"(?:visual\.blocks|vision_tower\.encoder\.layers?)\.(\d+)\."
PROJECTION = r"(attn\.proj|attention\.projection_layer|self_attn\.out_proj)\.weight"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_counts_the_matrices_of_transformers(family: str) -> None:
    config = small_config(family)
    cost = ModelCost.of(entries_of(config), part(family, "config").architecture(config))
    text, parameters = config.text_config, dict(build_in_transformers(config).named_parameters())
    per_token = per_patch = 0.0
    blocks = []  # share of the patches that each block gets
    merged_after = getattr(config.vision_config, "insert_layer_id", 2)
    for name, parameter in parameters.items():
        if re.match(r"model\.(language_model\.)?layers\.", name) and parameter.dim() > 1:
            stacked = ".experts." in name  # a token goes through some of the experts
            share = text.num_experts_per_tok / len(parameter) if stacked else 1
            per_token += 2 * share * parameter.numel()
        elif (found := re.search(BLOCK, name)) and parameter.dim() > 1:
            share = 1 if int(found[1]) <= merged_after else 1 / 4
            per_patch += 2 * parameter.numel() * share
            blocks += [share] if re.search(PROJECTION, name) else []
    assert per_token > 0 < per_patch
    layers = text.num_hidden_layers
    linear = sum(kind == "linear_attention" for kind in getattr(text, "layer_types", None) or ())
    if linear:  # the rule itself, in chunks of 64 tokens
        size = (text.linear_key_head_dim, text.linear_value_head_dim)
        rule = 6 * size[0] * size[1] + 64 * (3 * size[0] + 2 * size[1])
        per_token += linear * text.linear_num_value_heads * rule
    assert (cost.per_token, cost.per_patch) == (per_token, per_patch)
    last = f"layers.{layers - 1}.self_attn.o_proj.weight"
    (width,) = (x.size(1) for name, x in parameters.items() if name.endswith(last))
    assert cost.per_pair == 4 * width * (layers - linear), "scores and sums of attention"
    width = next(
        x.size(0)
        for name, x in parameters.items()
        if re.search(PROJECTION, name) and not name.startswith("audio_tower.")
    )
    assert len(blocks) == 2
    assert cost.per_patch_pair == 4 * width * sum(share**2 for share in blocks)


def test_audio_costs_what_its_tower_multiplies() -> None:
    """A clip of whole chunks, counted by transformers' own tower."""
    config = small_config("qwen3_omni_moe")
    cost = ModelCost.of(entries_of(config), part("qwen3_omni_moe", "config").architecture(config))
    tower = build_in_transformers(config, "cpu").audio_tower
    counted, num_frames = 0.0, 4 * 2 * config.audio_config.n_window

    def count(module: Any, inputs: Any, output: torch.Tensor) -> None:
        nonlocal counted
        counted += 2 * module.weight[0].numel() * output.numel()

    for name, module in tower.named_modules():
        is_merger = name in ("proj1", "proj2")
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and not is_merger:
            module.register_forward_hook(count)
    frames = torch.randn(config.audio_config.num_mel_bins, num_frames)
    with torch.no_grad():
        tower(frames, feature_lens=torch.tensor([num_frames]))
    num_tokens = count_tokens(num_frames, 2 * config.audio_config.n_window)
    clip = ProcessedAudio("clip", frames.t(), image("any", 4).format, length=num_tokens)
    assert cost.item(clip) == pytest.approx(counted, rel=0.1)  # chunks end within a token


def of(tree: Tree, images: Any) -> float:
    return COST.tree(tree, images)


def test_the_prompt_is_counted_once_and_the_tower_too() -> None:
    images = {"small": image("small", 4), "large": image("large", 16)}
    one, two = of(tree(10, [5], "small"), images), of(tree(10, [5, 5], "small"), images)
    response = 5 * 1000 + 10 * (5 * 10 + 5 * 6 / 2)
    assert two - one == response
    assert one == 10 * 1000 + 10 * 10 * 11 / 2 + response + 16 * (100 + 16)
    assert of(tree(10, [5], "large"), images) - one == 256 * (100 + 256) - 16 * (100 + 16)


def test_a_tree_of_turns_attends_its_ancestors() -> None:
    root, reply = segment(4, 0, -1), segment(3, 4, 0)
    turn = Segment(reply.token_ids, reply.positions, 1, is_target=True)
    chain, fan = Tree((root, reply, turn)), Tree((root, reply, reply))
    extra_pairs = 3 * 3
    assert of(chain, {}) - of(fan, {}) == extra_pairs * 10


def test_a_video_attends_frame_by_frame() -> None:
    frame = image("video", 4)
    frames = replace(frame, pixels=frame.pixels.repeat(6, 1, 1, 1))  # two in a patch
    assert frames.grid == (3, 4, 4)
    blind = of(Tree((segment(4, 0, -1),)), {})
    seen = of(Tree((segment(4, 0, -1, images=("video",)),)), {"video": frames})
    assert seen - blind == 3 * 16 * (100 + 16)
