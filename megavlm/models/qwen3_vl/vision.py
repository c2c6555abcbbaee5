"""Vision tower of Qwen3-VL, dense and MoE: LayerNorm, a learned position table that is interpolated
to each image's grid, attention over whole frames, and DeepStack.

Source: transformers `models/qwen3_vl/modeling_qwen3_vl.py` and `vision_utils.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megavlm.data.media.image_processing import Grid
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_layers import (
    Attention,
    PatchEmbed,
    Segments,
    VisionBlock,
    activation,
    cache_frames,
    layer_norm,
    merge_order,
    pack_values,
    patch_positions,
    rotary_angles,
    rotary_theta,
)


class MLP(nn.Module):
    def __init__(self, size: int, intermediate_size: int, hidden_act: str) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(size, intermediate_size)
        self.linear_fc2 = nn.Linear(intermediate_size, size)
        self.act = activation(hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.act(self.linear_fc1(x)))


class PatchMerger(nn.Module):
    """Merger of the merge^2 patches of a cell to one language token: [P, D] to [P / merge^2, H],
    with exact (erf) GELU. A DeepStack merger normalises the whole cell, the final merger each
    patch.
    """

    def __init__(self, config: Any, *, norm_whole_cell: bool) -> None:
        super().__init__()
        self.merged_size = config.hidden_size * config.spatial_merge_size**2
        self.norm_whole_cell = norm_whole_cell
        self.norm = layer_norm(self.merged_size if norm_whole_cell else config.hidden_size)
        self.linear_fc1 = nn.Linear(self.merged_size, self.merged_size)
        self.act = nn.GELU()
        self.linear_fc2 = nn.Linear(self.merged_size, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_whole_cell:
            x = self.norm(x.view(-1, self.merged_size))
        else:
            x = self.norm(x).view(-1, self.merged_size)
        return self.linear_fc2(self.act(self.linear_fc1(x)))


def axis_taps(size: int, side: int) -> tuple[Tensor, Tensor]:
    """Interpolate linearly along one side of the position table, with aligned corners.

    Returns the two table entries (of `side`) around each of `size` places, and their weights, both
    [size, 2].
    """
    source = torch.arange(size, dtype=torch.float32) * (side - 1) / max(size - 1, 1)
    taps = source.floor()[:, None] + torch.arange(2)
    weights = 1.0 - (source[:, None] - taps).abs()
    return taps.long().clamp(max=side - 1), weights  # a clamped entry has weight 0


@cache_frames
def table_taps(height: int, width: int, merge: int, side: int) -> Tensor:
    """Return the four rows of the flat [side * side] table for each patch, in merge order
    [h * w, 4].
    """
    rows, columns = axis_taps(height, side)[0], axis_taps(width, side)[0]
    taps = rows[:, None, :, None] * side + columns[None, :, None, :]  # [h, w, 2, 2]
    return merge_order(taps.flatten(2), merge)


@cache_frames
def table_weights(height: int, width: int, merge: int, side: int) -> Tensor:
    """Return the weights of `table_taps`, fp32 [h * w, 4]."""
    rows, columns = axis_taps(height, side)[1], axis_taps(width, side)[1]
    weights = rows[:, None, :, None] * columns[None, :, None, :]
    return merge_order(weights.flatten(2), merge)


class VisionTower(Tower):
    """Tower that maps patches [P, C*T*P*P] in merge order and their grids to features and DeepStack
    levels [P / merge^2, (1 + num_levels) * H].
    """

    def __init__(self, hf_config: Any, tapped_blocks: Sequence[int] | None = None) -> None:
        """Build the tower from the `vision_config` of Qwen3-VL, dense or MoE.

        tapped_blocks: Blocks whose output becomes a DeepStack level; None uses the blocks that
            configuration lists.
        """
        super().__init__()
        config = hf_config.vision_config
        self.merge_size = config.spatial_merge_size
        self.feature_size = config.out_hidden_size
        if tapped_blocks is None:
            tapped_blocks = config.deepstack_visual_indexes
        self.tapped_blocks = tuple(tapped_blocks)
        self.num_levels = len(self.tapped_blocks)
        size = config.hidden_size
        self.head_dim = size // config.num_heads
        self.theta = rotary_theta(config)
        self.patch_embed = PatchEmbed(config, size, bias=True)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, size)
        self.blocks = nn.ModuleList(
            VisionBlock(
                size,
                layer_norm,
                Attention(size, config.num_heads),
                MLP(size, config.intermediate_size, config.hidden_act),
            )
            for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, norm_whole_cell=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, norm_whole_cell=True) for _ in range(self.num_levels)
        )

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        device = patches.device
        x = self.patch_embed(patches)
        x = x + self._learned_positions(grids, device).to(x.dtype)
        positions = pack_values(grids, lambda h, w: patch_positions(h, w, self.merge_size))
        rotary = rotary_angles(positions.to(device), self.head_dim, self.theta)
        segments = [Segments.frames(grids, device)] * len(self.blocks)
        x, tapped = self.run_blocks(x, segments, rotary, taps=self.tapped_blocks)
        levels = [
            self.deepstack_merger_list[self.tapped_blocks.index(block)](hidden)
            for block, hidden in zip(sorted(self.tapped_blocks), tapped, strict=True)
        ]
        return torch.cat([self.merger(x), *levels], dim=-1)

    def _learned_positions(self, grids: Sequence[Grid], device: torch.device) -> Tensor:
        """Return position embeddings [P, D]: weighted sums of four table entries, in fp32."""
        side, merge = math.isqrt(self.pos_embed.num_embeddings), self.merge_size
        taps = pack_values(grids, lambda h, w: table_taps(h, w, merge, side)).to(device)
        weights = pack_values(grids, lambda h, w: table_weights(h, w, merge, side)).to(device)
        return (self.pos_embed(taps) * weights[:, :, None]).sum(1)
