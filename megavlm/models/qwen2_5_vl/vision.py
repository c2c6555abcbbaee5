"""Qwen2.5-VL's vision tower: plain modules with HF's parameter names, all pictures packed in one
batch.

Source: transformers `models/qwen2_5_vl/modeling_qwen2_5_vl.py`. The patch embedding is a linear
layer (a Conv3d of kernel equal to its stride is the same arithmetic). Shapes: P patches of all
pictures, D vision hidden size, H language hidden size.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_merge import Grid


class RMSNorm(nn.Module):
    """Normalises in fp32 and scales in the input's precision, as the released model does."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True)
class Segments:
    """Attention segments of one batch, grouped by length: each [count, length] of patch indices;
    `inverse` [P] undoes it.
    """

    groups: tuple[Tensor, ...]
    inverse: Tensor

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> "Segments":
        starts: dict[int, list[int]] = {}
        start = 0
        for length in lengths:
            starts.setdefault(length, []).append(start)
            start += length
        groups = tuple(
            torch.tensor(s)[:, None] + torch.arange(length) for length, s in starts.items()
        )
        inverse = torch.cat([g.flatten() for g in groups]).argsort()
        return cls(tuple(g.to(device) for g in groups), inverse.to(device))


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """Full attention within each segment. [P, heads, d] in and out."""
    outputs = []
    for index in segments.groups:
        q, k, v = (x[index].transpose(1, 2) for x in (query, key, value))
        outputs.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[segments.inverse]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in fp32. x [P, heads, d], cos and sin [P, 1, d]."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x).view(x.size(0), 3, self.num_heads, -1).unbind(1)
        return self.proj(attend(rotate(q, cos, sin), rotate(k, cos, sin), v, segments).flatten(1))


class MLP(nn.Module):
    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size)
        self.up_proj = nn.Linear(size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, size: int, num_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(size), RMSNorm(size)
        self.attn = Attention(size, num_heads)
        self.mlp = MLP(size, intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, segments)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Four patches become one language token; GELU in its exact (erf) form."""

    def __init__(self, size: int, merged_size: int, out_size: int) -> None:
        super().__init__()
        self.ln_q = RMSNorm(size)
        self.mlp = nn.Sequential(
            nn.Linear(merged_size, merged_size), nn.GELU(), nn.Linear(merged_size, out_size)
        )
        self.merged_size = merged_size

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).view(-1, self.merged_size))


class PatchEmbed(nn.Module):
    def __init__(self, patch_size: int, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(patch_size, size, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches.to(self.proj.weight.dtype))


@functools.lru_cache(maxsize=1024)
def _geometry(
    grid: Grid, merge: int, window: int
) -> tuple[Tensor, Tensor, tuple[int, ...], tuple[int, ...]]:
    """Of one picture: (h, w) of each patch in merge order [P, 2]; window order of merged cells;
    window and frame lengths.
    """
    frames, height, width = grid
    rows = torch.arange(height)[:, None].expand(height, width)
    columns = torch.arange(width)[None, :].expand(height, width)
    cells = torch.stack([rows, columns], -1).view(height // merge, merge, width // merge, merge, 2)
    positions = cells.transpose(1, 2).reshape(-1, 2).repeat(frames, 1)
    merged = torch.arange(frames * height * width // merge**2).view(
        frames, height // merge, width // merge
    )
    windows = [
        frame[i : i + window, j : j + window].flatten()
        for frame in merged
        for i in range(0, height // merge, window)
        for j in range(0, width // merge, window)
    ]
    return (
        positions,
        torch.cat(windows),
        tuple(w.numel() * merge**2 for w in windows),
        (height * width,) * frames,
    )


class VisionTower(Tower):
    """patches [P, C*T*P*P] in merge-block order and their grids to features [P / merge^2, H]."""

    def __init__(self, config: Any) -> None:
        """`config`: the `vision_config` of a Qwen2.5-VL configuration."""
        super().__init__()
        self.merge_size = config.spatial_merge_size
        self.feature_size = config.out_hidden_size
        self.window = (
            config.window_size // self.merge_size // config.patch_size
        )  # in merged cells a side
        self.head_dim = config.hidden_size // config.num_heads
        self.full_attention = frozenset(config.fullatt_block_indexes)
        patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.patch_embed = PatchEmbed(patch, config.hidden_size)
        self.blocks = nn.ModuleList(
            Block(config.hidden_size, config.num_heads, config.intermediate_size)
            for _ in range(config.depth)
        )
        self.merger = Merger(
            config.hidden_size, config.hidden_size * self.merge_size**2, config.out_hidden_size
        )

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        device = patches.device
        geometry = [_geometry(tuple(grid), self.merge_size, self.window) for grid in grids]
        frame_segments = Segments.of_lengths([n for g in geometry for n in g[3]], device)
        window_segments = Segments.of_lengths([n for g in geometry for n in g[2]], device)
        window_order = self._window_order([g[1] for g in geometry]).to(device)
        cos, sin = self._rotary(torch.cat([g[0] for g in geometry]).to(device))

        unit = self.merge_size**2
        by_window = (window_order[:, None] * unit + torch.arange(unit, device=device)).flatten()
        x = self.patch_embed(patches)[by_window]
        cos, sin = cos[by_window], sin[by_window]
        for index, block in enumerate(self.blocks):
            x = block(
                x, cos, sin, frame_segments if index in self.full_attention else window_segments
            )
        return self.merger(x)[window_order.argsort()]

    @staticmethod
    def _window_order(orders: Sequence[Tensor]) -> Tensor:
        offsets = [0]
        for order in orders:
            offsets.append(offsets[-1] + order.numel())
        return torch.cat([order + offset for order, offset in zip(orders, offsets, strict=False)])

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [P, 2] to cos and sin [P, 1, head_dim]; theta 10,000 over a quarter of the head
        for each direction.
        """
        half = self.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=positions.device) / half
        angles = (positions[:, :, None].float() / 10_000.0**exponents).flatten(1)
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return angles.cos(), angles.sin()
