"""Modelled forward FLOPs of a tree, language model and tower together, for balancing ranks."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megavlm.data.packing import Tree
from megavlm.data.processor import ProcessedImage
from megavlm.models.common.mapping import Entry

TreeCost = Callable[[Tree], float]


@dataclass(frozen=True)
class ModelCost:
    """Two FLOPs per multiply-add: the linear layers by tokens and patches, attention by pairs that
    attend.
    """

    per_token: float
    per_pair: float
    per_patch: float
    per_patch_pair: float

    @classmethod
    def of(cls, entries: Iterable[Entry], hf_config: Any) -> "ModelCost":
        """`entries`: the model's mapping, whose matrices are what a token is multiplied with."""
        text, vision = hf_config.text_config, hf_config.vision_config
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        per_token = per_patch = width = 0.0
        for entry in entries:
            if entry.megatron.startswith("language_model.decoder.layers."):
                matrices = sum(math.prod(shape) for shape in entry.hf_shapes if len(shape) > 1)
                if entry.expert is not None:  # a token sees some of its stack's experts
                    experts = text.num_experts
                    matrices *= text.num_experts_per_tok / experts / experts
                per_token += 2 * matrices
            elif entry.megatron.startswith("visual.blocks."):
                per_patch += 2 * sum(math.prod(x) for x in entry.hf_shapes if len(x) > 1)
                if entry.megatron.endswith(".attn.proj.weight"):
                    width = entry.hf_shapes[0][0]
        return cls(
            per_token,
            4.0 * text.num_attention_heads * head_dim * text.num_hidden_layers,
            per_patch,
            4.0 * width * vision.depth,
        )

    def tree(self, tree: Tree, images: Mapping[str, ProcessedImage]) -> float:
        flops = 0.0
        for segment in tree.segments:
            length, context, parent = len(segment.token_ids), 0, segment.parent
            while parent >= 0:
                context += len(tree.segments[parent].token_ids)
                parent = tree.segments[parent].parent
            flops += self.per_token * length
            flops += self.per_pair * length * (context + (length + 1) / 2)
        for key in tree.images:
            frames, height, width = images[key].grid
            size = height * width
            flops += frames * size * (self.per_patch + self.per_patch_pair * size)
        return flops
