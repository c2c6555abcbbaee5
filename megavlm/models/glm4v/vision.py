"""Vision tower of GLM-4.1V and GLM-4.6V: RMSNorm, a gated MLP, a learned position table that is
interpolated by cubic splines, and a convolution that joins the patches of a token.

Source: transformers `models/glm4v/modeling_glm4v.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megavlm.data.media.videos import Grid
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_layers import (
    Attention,
    PatchEmbed,
    Segments,
    VisionBlock,
    activation,
    cache_frames,
    merge_order,
    pack_values,
    patch_positions,
    rotary_angles,
    rotary_theta,
)

CUBIC = -0.75  # parameter of the splines, as in torch


class GatedMLP(nn.Module):
    """Gated MLP without biases. Its input and output have `size` features."""

    def __init__(self, size: int, width: int, hidden_act: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, width, bias=False)
        self.up_proj = nn.Linear(size, width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)
        self.act = activation(hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Merger(GatedMLP):
    """MLP over the tokens that `downsample` returns, after a projection and a norm."""

    def __init__(self, size: int, width: int, hidden_act: str) -> None:
        super().__init__(size, width, hidden_act)
        self.proj = nn.Linear(size, size, bias=False)
        self.post_projection_norm = nn.LayerNorm(size)
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.gelu(self.post_projection_norm(self.proj(x))))


@cache_frames
def axis_weights(size: int, side: int) -> Tensor:
    """Return the weights [size, side] of the entries along one side of the position table for each
    of `size` patches. A place beyond the table has its outermost entry.

    These are the weights of torch's `grid_sample` with mode bicubic, padding_mode border and
    align_corners False.
    """
    source = (torch.arange(size, dtype=torch.float64) + 0.5) * side / size - 0.5
    taps = source.floor()[:, None] + torch.arange(-1, 3)  # [size, 4]
    distance = (source[:, None] - taps).abs()
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance - 4
    weights = torch.where(distance <= 1, near, CUBIC * far)
    table = torch.zeros(size, side, dtype=torch.float64)
    return table.scatter_add(1, taps.long().clamp(0, side - 1), weights).float()


class Embeddings(nn.Module):
    """Learned positions: a square table, interpolated to the size of each frame."""

    def __init__(self, num_positions: int, size: int) -> None:
        super().__init__()
        self.position_embedding = nn.Embedding(num_positions, size)

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        """Return the positions [P, D] of all patches in merge order."""
        weight = self.position_embedding.weight
        side = math.isqrt(len(weight))
        table = weight.float().view(side, side, -1)
        frames = {}
        for height, width in dict.fromkeys(grid[1:] for grid in grids):
            rows, columns = (axis_weights(size, side).to(weight.device) for size in (height, width))
            frame = torch.einsum("hi,wj,ijd->hwd", rows, columns, table)
            frames[height, width] = merge_order(frame, merge)
        return pack_values(grids, lambda h, w: frames[h, w]).to(weight.dtype)


class VisionTower(Tower):
    """Tower that maps patches [P, C*T*P*P] in merge order and their grids to features
    [P / merge^2, H].
    """

    def __init__(self, hf_config: Any) -> None:
        """Build the tower from the `vision_config` of GLM-4.1V or GLM-4.6V, dense or MoE."""
        super().__init__()
        config = hf_config.vision_config
        self.merge_size = config.spatial_merge_size
        self.feature_size = config.out_hidden_size
        size = config.hidden_size
        self.head_dim = size // config.num_heads
        self.theta = rotary_theta(config)

        def norm(features: int) -> nn.RMSNorm:
            return nn.RMSNorm(features, eps=config.rms_norm_eps)

        self.patch_embed = PatchEmbed(config, size, bias=True)
        self.post_conv_layernorm = norm(size)
        self.embeddings = Embeddings((config.image_size // config.patch_size) ** 2, size)
        # In the released models, too, the width of a block's MLP is `out_hidden_size`, and
        # `intermediate_size` the width of the merger.
        self.blocks = nn.ModuleList(
            VisionBlock(
                size,
                norm,
                Attention(size, config.num_heads, qkv_bias=config.attention_bias, bias=False),
                GatedMLP(size, config.out_hidden_size, config.hidden_act),
            )
            for _ in range(config.depth)
        )
        self.post_layernorm = norm(size)
        self.downsample = nn.Linear(size * self.merge_size**2, self.feature_size)
        self.merger = Merger(self.feature_size, config.intermediate_size, config.hidden_act)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        device, merge = patches.device, self.merge_size
        x = self.post_conv_layernorm(self.patch_embed(patches))
        x = x + self.embeddings(grids, merge)
        positions = pack_values(grids, lambda h, w: patch_positions(h, w, merge))
        rotary = rotary_angles(positions.to(device), self.head_dim, self.theta)
        segments = [Segments.frames(grids, device)] * len(self.blocks)
        x, _ = self.run_blocks(x, segments, rotary)
        # A convolution whose kernel is a cell: its weight has the patches of a cell innermost.
        cells = self.post_layernorm(x).view(-1, merge**2, x.size(1)).transpose(1, 2)
        return self.merger(self.downsample(cells.flatten(1)))
