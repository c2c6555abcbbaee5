"""InternVL's vision tower: every tile is encoded by itself, with a class token.

Source: transformers `models/internvl/modeling_internvl.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.data.media.image_processing import Grid
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_layers import Segments, attend, merge_order


class Attention(nn.Module):
    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)
        return self.proj(attend(q, k, v, segments).flatten(1))


class MLP(nn.Module):
    def __init__(self, size: int, ffn: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, ffn), nn.Linear(ffn, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self.norm1, self.norm2 = nn.LayerNorm(size, eps), nn.LayerNorm(size, eps)
        self.attn = Attention(size, config.num_attention_heads)
        self.mlp = MLP(size, config.intermediate_size)
        self.scale1, self.scale2 = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        """Run the block. It has no rotary embedding, and reads neither cos nor sin."""
        x = x + self.scale1 * self.attn(self.norm1(x), segments)
        return x + self.scale2 * self.mlp(self.norm2(x))


class Merger(nn.Module):
    def __init__(self, merged_size: int, out_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(merged_size)
        self.fc1, self.fc2 = nn.Linear(merged_size, out_size), nn.Linear(out_size, out_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


class VisionTower(Tower):
    """Tower over tiles; a tile is a frame of its image's grid."""

    def __init__(self, hf_config: Any) -> None:
        """Build the tower from transformers' InternVLConfig."""
        super().__init__()
        config = hf_config.vision_config
        self.merge_size = round(1 / hf_config.downsample_ratio)
        self.feature_size = hf_config.text_config.hidden_size
        size, patch = config.hidden_size, config.patch_size[0]
        num_patches = (config.image_size[0] // patch) ** 2
        self.patch_embed = nn.Linear(config.num_channels * patch**2, size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, size))
        self.position_embeddings = nn.Parameter(torch.zeros(1, num_patches + 1, size))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.merger = Merger(size * self.merge_size**2, self.feature_size)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        tiles, side = sum(t for t, _, _ in grids), grids[0][1]
        size = self.patch_embed.out_features
        classes, table = self.position_embeddings[0].split([1, side**2])
        embedded = self.patch_embed(patches.to(table.dtype)).view(tiles, side**2, size)
        embedded = embedded + merge_order(table.view(side, side, size), self.merge_size)
        first = (self.cls_token + classes).expand(tiles, 1, size)
        x = torch.cat([first, embedded], dim=1).flatten(0, 1)
        segments = Segments((side**2 + 1,) * tiles, x.device)
        nothing = x.new_empty(0)
        x, _ = self.run_blocks(x, nothing, nothing, [segments] * len(self.blocks))
        x = x.view(tiles, side**2 + 1, size)[:, 1:]
        return self.merger(x.reshape(-1, size * self.merge_size**2))
