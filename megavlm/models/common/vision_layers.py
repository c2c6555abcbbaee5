"""Layers of the families' vision towers: attention within segments, rotary embedding, mergers.

Modules have transformers' parameter names. Geometry is computed on the CPU and cached for a frame
(h, w); a batch repeats it, frame after frame, and moves it to the device once. Shapes: P patches of
all images, D vision hidden size, d head size.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.data.videos import Grid
from megavlm.models.common.attention_backends import varlen_attention
from megavlm.models.common.pack_layout import cumulative_bounds
from megavlm.parallel import platform

# A frame of 16,384 patches takes about 1 MB in all of a family's caches.
cache_frames = functools.lru_cache(maxsize=256)


# Geometry


def merge_order(x: Tensor, merge: int) -> Tensor:
    """Reorder [h, w, ...] to [h * w, ...], the merge^2 patches of a language token in a row."""
    height, width = x.shape[:2]
    cells = x.reshape(height // merge, merge, width // merge, merge, *x.shape[2:])
    return cells.transpose(1, 2).flatten(0, 3)


@cache_frames
def patch_positions(height: int, width: int, merge: int) -> Tensor:
    """Return (row, column) of each patch of a frame in merge order [h * w, 2]."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return merge_order(torch.stack([rows, columns], -1), merge)


def pack_values(grids: Sequence[Grid], of_frame: Callable[[int, int], Tensor]) -> Tensor:
    """Join a tensor [n, ...] of each frame into one [sum of n, ...]."""
    parts = []
    for frames, height, width in grids:
        values = of_frame(height, width)
        parts.append(values.expand(frames, *values.shape).flatten(0, 1))
    return torch.cat(parts)


def pack_orders(grids: Sequence[Grid], of_frame: Callable[[int, int], Tensor]) -> Tensor:
    """Join a permutation [n] of each frame's rows into one of all rows [sum of n]."""
    parts, start = [], 0
    for frames, height, width in grids:
        order = of_frame(height, width)
        starts = start + order.numel() * torch.arange(frames)
        parts.append((starts[:, None] + order).flatten())
        start += frames * order.numel()
    return torch.cat(parts)


def inverse_order(order: Tensor) -> Tensor:
    """Return the permutation that undoes `order`: x[order][inverse] is x."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


# Attention


@dataclass(frozen=True)
class Segments:
    """Attention segments of one batch: runs of patches that follow one another, of `lengths`."""

    lengths: tuple[int, ...]  # [B]
    device: torch.device

    @classmethod
    def pack(
        cls,
        grids: Sequence[Grid],
        of_frame: Callable[[int, int], Sequence[int]],
        device: torch.device,
    ) -> "Segments":
        """Join the segments of all frames. `of_frame(h, w)`: the lengths of one frame's."""
        parts = (tuple(of_frame(height, width)) * frames for frames, height, width in grids)
        return cls(tuple(itertools.chain.from_iterable(parts)), device)

    @classmethod
    def frames(cls, grids: Sequence[Grid], device: torch.device) -> "Segments":
        """Make each frame a segment: no patch attends to another frame of its video."""
        return cls.pack(grids, lambda h, w: [h * w], device)

    @functools.cached_property
    def bounds(self) -> Tensor:
        """First patch of each segment, then P: [B + 1] int32, for variable-length kernels."""
        return cumulative_bounds(self.lengths, self.device)

    @functools.cached_property
    def groups(self) -> tuple[Tensor, ...]:
        """Patch indices of the segments of each length [count, length]."""
        return tuple(group.to(self.device) for group in self._groups())

    @functools.cached_property
    def inverse(self) -> Tensor:
        """Index [P] that undoes the grouping."""
        groups = torch.cat([group.flatten() for group in self._groups()])
        return inverse_order(groups).to(self.device)

    def _groups(self) -> list[Tensor]:
        lengths = torch.tensor(self.lengths)
        starts = lengths.cumsum(0) - lengths
        return [
            starts[lengths == length][:, None] + torch.arange(length)
            for length in dict.fromkeys(self.lengths)
        ]


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """Compute full attention within each segment. [P, heads, d] in and out.

    On a GPU that is one variable-length kernel; it takes no float32. Elsewhere the segments of each
    length are a batch.
    """
    if platform.has_gpu() and query.dtype != torch.float32:
        bounds, longest, scale = segments.bounds, max(segments.lengths), query.size(2) ** -0.5
        return varlen_attention(
            query, key, value, bounds, bounds, longest, longest, scale=scale, is_causal=False
        )
    outputs = []
    for index in segments.groups:
        q, k, v = (x[index].transpose(1, 2) for x in (query, key, value))
        outputs.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[segments.inverse]


def rotary_theta(config: Any) -> float:
    """Return the theta of a `vision_config`: 10,000 where it has none, as in older transformers."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin [P, 1, d] in fp32 for positions [P, 2]: d / 4 angles by row, d / 4 by
    column, and all of them again, once for each half that `rotate` rotates.
    """
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=positions.device) / half
    angles = (positions[:, :, None].float() * (1.0 / theta**exponents)).flatten(1)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding in fp32. x [P, heads, d], cos and sin [P, 1, d]."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


# Layers


class PatchEmbed(nn.Module):
    """Patch embedding: a Conv3d whose kernel is its stride, as a linear [D, C * T * P * P]."""

    def __init__(self, config: Any, size: int, *, bias: bool) -> None:
        super().__init__()
        patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.proj = nn.Linear(patch, size, bias=bias)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches.to(self.proj.weight.dtype))


class Attention(nn.Module):
    """Attention within segments, x [P, D] in and out."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x).view(x.size(0), 3, self.num_heads, -1).unbind(1)
        return self.proj(attend(rotate(q, cos, sin), rotate(k, cos, sin), v, segments).flatten(1))


class VisionBlock(nn.Module):
    """Transformer block. `norm`: makes a norm of a size. `mlp`: the family's."""

    def __init__(
        self, size: int, num_heads: int, norm: Callable[[int], nn.Module], mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(size), norm(size)
        self.attn = Attention(size, num_heads)
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, segments)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Merger of the patches [P, D] of a merge cell into one language token [P / merge^2, H], with
    exact (erf) GELU.
    """

    def __init__(self, norm: nn.Module, merged_size: int, out_size: int) -> None:
        super().__init__()
        self.ln_q = norm
        self.mlp = nn.Sequential(
            nn.Linear(merged_size, merged_size), nn.GELU(), nn.Linear(merged_size, out_size)
        )
        self.merged_size = merged_size

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).view(-1, self.merged_size))


def layer_norm(size: int) -> nn.LayerNorm:
    """Return a LayerNorm with the eps of all families, which is in no configuration."""
    return nn.LayerNorm(size, eps=1e-6)


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": F.silu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation by transformers' name. Raises ValueError for one that no family uses."""
    if name not in ACTIVATIONS:
        raise ValueError(
            f"vision_config.hidden_act: {name!r} is not supported; "
            f"use one of {', '.join(sorted(ACTIVATIONS))}."
        )
    return ACTIVATIONS[name]
