"""Modelled forward FLOPs of a tree, language model and tower together, for balancing ranks."""

from collections.abc import Callable, Mapping
from typing import Any

from megavlm.data.packing import Tree
from megavlm.data.processor import Picture

TreeCost = Callable[[Tree], float]


def tree_cost(hf_config: Any, pictures: Mapping[str, Picture]) -> TreeCost:
    """Two FLOPs per multiply-add: the linear layers by tokens, attention by pairs that attend."""
    text, vision = hf_config.text_config, hf_config.vision_config
    per_token = _layer_flops(text.hidden_size, text.intermediate_size) * text.num_hidden_layers
    per_pair = 4 * text.hidden_size * text.num_hidden_layers
    per_patch = _layer_flops(vision.hidden_size, vision.intermediate_size) * vision.depth
    per_patch_pair = 4 * vision.hidden_size * vision.depth

    def cost(tree: Tree) -> float:
        flops = 0.0
        for segment in tree.segments:
            length, context, parent = len(segment.token_ids), 0, segment.parent
            while parent >= 0:
                context += len(tree.segments[parent].token_ids)
                parent = tree.segments[parent].parent
            flops += per_token * length + per_pair * length * (context + (length + 1) / 2)
        for key in tree.pictures:
            frames, height, width = pictures[key].grid
            flops += frames * height * width * (per_patch + per_patch_pair * height * width)
        return flops

    return cost


def _layer_flops(hidden_size: int, intermediate_size: int) -> float:
    return 2.0 * (4 * hidden_size**2 + 3 * hidden_size * intermediate_size)
