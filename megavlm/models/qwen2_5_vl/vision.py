"""Qwen2.5-VL's vision tower: RMSNorm, a gated MLP, and attention within windows in most blocks.

Source: transformers `models/qwen2_5_vl/modeling_qwen2_5_vl.py`. Patches are sorted into window
order once, before the blocks; features are returned in the images' order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megavlm.data.media.image_processing import Grid
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_layers import (
    Attention,
    Merger,
    PaddedLinear,
    PatchEmbed,
    Segments,
    VisionBlock,
    activation,
    cache_frames,
    inverse_order,
    pack_orders,
    pack_values,
    patch_positions,
    rotary_angles,
    rotary_theta,
)


def rms_norm(size: int) -> nn.RMSNorm:
    """Return the norm of all blocks: one kernel on a GPU, which computes in fp32 and rounds once,
    where the released model rounds before it scales.
    """
    return nn.RMSNorm(size, eps=1e-6)


class MLP(nn.Module):
    """Gated MLP, computed at a width that is a multiple of 64: the released 3B and 7B are 3,420
    wide. Gate and up are zero in the added columns, so that the activation is zero there, too.
    """

    def __init__(self, size: int, intermediate_size: int, hidden_act: str) -> None:
        super().__init__()
        width = -(-intermediate_size // 64) * 64
        self.gate_proj = PaddedLinear(size, intermediate_size, width)
        self.up_proj = PaddedLinear(size, intermediate_size, width)
        self.down_proj = PaddedLinear(intermediate_size, size, size)
        self.act = activation(hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def frame_windows(height: int, width: int, window: int) -> list[Tensor]:
    """Cut a frame of [height, width] merged cells into windows, and return the cells of each
    window. Windows at the right and lower edge are smaller.
    """
    cells = torch.arange(height * width).view(height, width)
    return [
        cells[i : i + window, j : j + window].flatten()
        for i in range(0, height, window)
        for j in range(0, width, window)
    ]


@cache_frames
def cell_order(height: int, width: int, merge: int, window: int) -> Tensor:
    """Return the order [h * w / merge^2] that sorts the merged cells of a frame of [height, width]
    patches by window.
    """
    return torch.cat(frame_windows(height // merge, width // merge, window))


@cache_frames
def patch_order(height: int, width: int, merge: int, window: int) -> Tensor:
    """Return the order [h * w] that sorts the patches of a frame by window, with the merge^2
    patches of a cell together.
    """
    cells = cell_order(height, width, merge, window)
    return (cells[:, None] * merge**2 + torch.arange(merge**2)).flatten()


@cache_frames
def window_lengths(height: int, width: int, merge: int, window: int) -> tuple[int, ...]:
    """Return the number of patches of each window of a frame, in window order."""
    windows = frame_windows(height // merge, width // merge, window)
    return tuple(cells.numel() * merge**2 for cells in windows)


class VisionTower(Tower):
    """Tower that maps patches [P, C*T*P*P] in merge order and their grids to features
    [P / merge^2, H].
    """

    def __init__(self, hf_config: Any) -> None:
        """Build the tower from the `vision_config` of a Qwen2.5-VL configuration."""
        super().__init__()
        config = hf_config.vision_config
        self.merge_size = config.spatial_merge_size
        self.feature_size = config.out_hidden_size
        # Side of a window in merged cells.
        self.window = config.window_size // self.merge_size // config.patch_size
        self.full_attention = frozenset(config.fullatt_block_indexes)
        size = config.hidden_size
        self.head_dim = size // config.num_heads
        self.theta = rotary_theta(config)
        self.patch_embed = PatchEmbed(config, size, bias=False)
        self.blocks = nn.ModuleList(
            VisionBlock(
                size,
                rms_norm,
                Attention(size, config.num_heads),
                MLP(size, config.intermediate_size, config.hidden_act),
            )
            for _ in range(config.depth)
        )
        self.merger = Merger(rms_norm(size), size * self.merge_size**2, self.feature_size)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        device, merge, window = patches.device, self.merge_size, self.window
        order = pack_orders(grids, lambda h, w: patch_order(h, w, merge, window))
        assert order.numel() == patches.size(0)
        cells = pack_orders(grids, lambda h, w: cell_order(h, w, merge, window))
        restored = inverse_order(cells).to(device)  # before the blocks: the copy waits for a GPU
        positions = pack_values(grids, lambda h, w: patch_positions(h, w, merge))[order]
        rotary = rotary_angles(positions.to(device), self.head_dim, self.theta)
        whole = Segments.frames(grids, device)
        windows = Segments.pack(grids, lambda h, w: window_lengths(h, w, merge, window), device)
        x, _ = self.run_blocks(
            self.patch_embed(patches[order.to(device)]),
            [whole if i in self.full_attention else windows for i in range(len(self.blocks))],
            rotary,
        )
        return self.merger(x)[restored]
