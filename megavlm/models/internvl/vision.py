"""Vision tower of InternVL3 and InternVL3.5 (InternViT): each tile is encoded by itself, with a
class token, learned positions and scales of the outputs of attention and MLP.

Source: transformers `models/internvl/modeling_internvl.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.data.media.videos import Grid
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_layers import (
    MLP,
    PaddedLinear,
    Segments,
    VisionBlock,
    activation,
    attend,
    merge_order,
)
from megavlm.models.internvl.config import merge_size, square_side


class Attention(nn.Module):
    """Attention within tiles, without a rotary embedding. Input and output are [P, D]. Queries and
    keys may be normalised, over the features of all heads together.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(size, 3 * size, bias=config.attention_bias)
        self.projection_layer = nn.Linear(size, size)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.use_qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        heads = (self.num_heads, -1)
        q, k, v = (x.unflatten(1, heads) for x in (self.q_norm(q), self.k_norm(k), v))
        return self.projection_layer(attend(q, k, v, segments).flatten(1))


class Block(VisionBlock):
    """Transformer block, in which learned scales multiply the outputs of attention and MLP."""

    def __init__(self, config: Any, norm: Callable[[int], nn.Module]) -> None:
        size = config.hidden_size
        mlp = MLP(size, config.intermediate_size, config.hidden_act)
        super().__init__(size, norm, Attention(config), mlp)
        self.scale1 = nn.Parameter(torch.full((size,), config.layer_scale_init_value))
        self.scale2 = nn.Parameter(torch.full((size,), config.layer_scale_init_value))

    def forward(self, x: Tensor, *geometry: Any) -> Tensor:
        x = x + self.scale1 * self.attn(self.norm1(x), *geometry)
        return x + self.scale2 * self.mlp(self.norm2(x))


class Merger(nn.Module):
    """MLP over the patches of a cell together, with a norm before it."""

    def __init__(self, merged_size: int, out_size: int, hidden_act: str) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(merged_size)
        self.linear_1 = nn.Linear(merged_size, out_size)
        self.linear_2 = nn.Linear(out_size, out_size)
        self.act = activation(hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(self.layer_norm(x))))


class VisionTower(Tower):
    """Tower that maps the patches [P, C*P*P] of tiles, in merge order, and their grids to features
    [P / merge^2, H]. A tile, or a frame of a video, is a frame of a grid.
    """

    separate_qkv = True

    def __init__(self, hf_config: Any) -> None:
        """Build the tower from transformers' InternVLConfig."""
        super().__init__()
        config = hf_config.vision_config
        self.merge_size = merge_size(hf_config)
        self.feature_size = hf_config.text_config.hidden_size
        size, patch = config.hidden_size, square_side(config.patch_size)
        num_patches = (square_side(config.image_size) // patch) ** 2
        kind = nn.LayerNorm if config.norm_type == "layer_norm" else nn.RMSNorm

        def norm(features: int) -> nn.Module:
            return kind(features, eps=config.layer_norm_eps)

        self.patch_embed = PaddedLinear(config.num_channels * patch**2, size, size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, size))
        self.position_embeddings = nn.Parameter(torch.zeros(1, num_patches + 1, size))
        self.blocks = nn.ModuleList(Block(config, norm) for _ in range(config.num_hidden_layers))
        merged_size = size * self.merge_size**2
        self.merger = Merger(merged_size, self.feature_size, hf_config.projector_hidden_act)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        tiles, side = sum(t for t, _, _ in grids), grids[0][1]
        size = self.patch_embed.out_features
        first, table = self.position_embeddings[0].split([1, side**2])
        padded = F.pad(patches.to(table.dtype), (0, -patches.size(1) % 8))
        embedded = self.patch_embed(padded).view(tiles, side**2, size)
        embedded = embedded + merge_order(table.view(side, side, size), self.merge_size)
        classes = (self.cls_token + first).expand(tiles, 1, size)
        x = torch.cat([classes, embedded], dim=1).flatten(0, 1)
        segments = Segments((side**2 + 1,) * tiles, x.device)
        x, _ = self.run_blocks(x, [segments] * len(self.blocks))
        x = x.view(tiles, side**2 + 1, size)[:, 1:]
        return self.merger(x.reshape(-1, size * self.merge_size**2))
