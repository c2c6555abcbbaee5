"""Modelled forward FLOPs of trees in language model and tower, to balance the work of ranks.

Not covered: the backward pass, communication, the embedding, the mergers, the output layer, and
attention in an audio tower, whose windows are short.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megavlm.data.media.image_processing import Grid, ProcessedImage
from megavlm.data.packs.trees import Tree
from megavlm.models.common.mapping import Entry

# Number of tokens for which an H100 computes as long as it reads the weights: 989e12 FLOP/s over
# 3.35e12 B/s, at 2 FLOPs per token and 2 bytes per weight.
LEAST_TOKENS = 295
H100_FLOPS = 989e12  # dense bf16, per second
# Shares of its peak (an H100's, too) that one H200 reached, see tests/benchmarks/GPU.md: in an
# update at the width of a 7B model, and in a tower of Qwen2.5-VL with its small matrices.
LANGUAGE_SHARE, TOWER_SHARE = 0.46, 0.21
CHUNK = 64  # tokens in a chunk of linear attention


@dataclass(frozen=True)
class ModelCost:
    """FLOPs per token, per patch, per attended pair of tokens or patches, and per token of a clip
    of audio, with two FLOPs per multiply-add.
    """

    per_token: float
    per_pair: float
    per_patch: float
    per_patch_pair: float
    per_clip_token: float = 0.0

    @classmethod
    def of(cls, entries: Iterable[Entry], architecture: Mapping[str, Any]) -> "ModelCost":
        """Return the cost of a model.

        entries: The model's mapping; it gives the matrices that tokens and patches are multiplied
            with.
        architecture: The result of its family's `architecture(hf_config)`.
        """
        per_token = per_patch = per_patch_pair = per_clip_token = 0.0
        for entry in entries:
            matrices = sum(math.prod(shape) for shape in entry.hf_shapes if len(shape) > 1)
            if entry.megatron.startswith("language_model.decoder.layers."):
                if entry.expert is not None:  # a token is routed to some experts of the stack
                    experts = entry.hf_shapes[0][0]
                    matrices *= architecture["moe_router_topk"] / experts / experts
                per_token += 2 * matrices
            elif entry.megatron.startswith("visual.blocks."):
                per_patch += 2 * matrices * entry.share
                if entry.megatron.endswith(".attn.qkv.weight"):
                    per_patch_pair += 4.0 * entry.hf_shapes[0][1] * entry.share**2
            elif entry.megatron.startswith("visual.audio."):
                per_clip_token += 2 * matrices * entry.share
        width = architecture["num_attention_heads"] * architecture["kv_channels"]
        linear_layers = sum(architecture.get("linear_attention_freq", ()))
        per_pair = 4.0 * width * (architecture["num_layers"] - linear_layers)
        if linear_layers:
            per_token += linear_layers * _delta_rule(architecture)
        return cls(per_token, per_pair, per_patch, per_patch_pair, per_clip_token)

    @property
    def least_pack(self) -> float:
        """FLOPs that take as long as reading the weights: the minimum cost of any pack."""
        return LEAST_TOKENS * self.per_token

    def segments(self, tree: Tree, images: Mapping[str, ProcessedImage]) -> list[float]:
        """Return the FLOPs of each segment of a tree, including its images."""
        costs, ends = [], list[int]()  # ends: tokens up to each segment's end, ancestors included
        for segment in tree.segments:
            length = len(segment.token_ids)
            context = ends[segment.parent] if segment.parent >= 0 else 0
            ends.append(context + length)
            flops = self.per_token * length
            flops += self.per_pair * length * (context + (length + 1) / 2)
            costs.append(flops + sum(self.item(images[key]) for key in segment.images))
        return costs

    def tree(self, tree: Tree, images: Mapping[str, ProcessedImage]) -> float:
        """Return the FLOPs of a tree, with each segment counted once."""
        return sum(self.segments(tree, images))

    def item(self, image: ProcessedImage) -> float:
        """Return the FLOPs of an image, a video or a clip of audio in the tower."""
        if image.medium == "audio":
            return self.per_clip_token * image.num_tokens
        return self.image(image.grids)

    def image(self, grids: Iterable[Grid]) -> float:
        """Return the FLOPs of an image or a video, of whose parts each has (t, h, w) patches."""
        frames = [(number, height * width) for number, height, width in grids]
        return sum(n * size * (self.per_patch + self.per_patch_pair * size) for n, size in frames)


def _delta_rule(architecture: Mapping[str, Any]) -> float:
    """Return the FLOPs of a token in a layer of Gated DeltaNet, without its weight matrices.

    Per head these are three products with the state (recall by the key, write, read by the query).
    Within a chunk they are the products with half of the chunk's keys, queries and values, and the
    solution of the triangular system.
    """
    key, value = architecture["linear_key_head_dim"], architecture["linear_value_head_dim"]
    within = CHUNK * (3 * key + 2 * value)
    return float(architecture["linear_num_value_heads"] * (6 * key * value + within))
