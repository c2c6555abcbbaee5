"""Layers of the families' vision towers: attention within segments, rotary embedding, mergers.

Modules have transformers' parameter names. Geometry is computed on the CPU and cached per frame
size (h, w); a batch joins the frames' geometry and moves it to the device once. Shapes: P patches
of all images, D vision hidden size, d head size.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.data.media.image_processing import Grid
from megavlm.models.common.varlen import cumulative_bounds, varlen_attention
from megavlm.parallel import platform

# A frame of 16,384 patches takes about 1 MB in all of a family's caches.
cache_frames = functools.lru_cache(maxsize=256)


# Geometry


def merge_order(x: Tensor, merge: int) -> Tensor:
    """Reorder [h, w, ...] to [h * w, ...] so that the merge^2 patches of a language token are
    consecutive.
    """
    height, width = x.shape[:2]
    cells = x.reshape(height // merge, merge, width // merge, merge, *x.shape[2:])
    return cells.transpose(1, 2).flatten(0, 3)


@cache_frames
def patch_positions(height: int, width: int, merge: int) -> Tensor:
    """Return (row, column) of each patch of a frame in merge order [h * w, 2]."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return merge_order(torch.stack([rows, columns], -1), merge)


def pack_values(grids: Sequence[Grid], of_frame: Callable[[int, int], Tensor]) -> Tensor:
    """Join the tensors [n, ...] of all frames to one [sum of n, ...]."""
    parts = []
    for frames, height, width in grids:
        values = of_frame(height, width)
        parts.append(values.expand(frames, *values.shape).flatten(0, 1))
    return torch.cat(parts)


def pack_orders(grids: Sequence[Grid], of_frame: Callable[[int, int], Tensor]) -> Tensor:
    """Join permutations [n] of the rows of each frame to one permutation of all rows [sum of n]."""
    parts, start = [], 0
    for frames, height, width in grids:
        order = of_frame(height, width)
        starts = start + order.numel() * torch.arange(frames)
        parts.append((starts[:, None] + order).flatten())
        start += frames * order.numel()
    return torch.cat(parts)


def inverse_order(order: Tensor) -> Tensor:
    """Return the inverse permutation of `order`: x[order][inverse] is x."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


# Attention


@dataclass(frozen=True)
class Segments:
    """Attention segments of one batch: consecutive runs of patches with the given lengths."""

    lengths: tuple[int, ...]  # [B]
    device: torch.device

    @classmethod
    def pack(
        cls,
        grids: Sequence[Grid],
        of_frame: Callable[[int, int], Sequence[int]],
        device: torch.device,
    ) -> "Segments":
        """Join the segments of all frames. `of_frame(h, w)` returns a frame's segment lengths."""
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
        """Patch indices [count, length] of the segments of each distinct length."""
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
    """Compute full attention within each segment. Inputs and output are [P, heads, d].

    A GPU uses one variable-length kernel, except in float32, which the kernel does not support.
    Otherwise the segments of each length are computed as one batch.
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
    """Return the theta of a `vision_config`. It is 10,000 if there is none, as in older
    transformers.
    """
    return (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin [P, 1, d] in fp32 for positions [P, 2]: d / 4 angles by row and d / 4 by
    column, repeated for the second half of the head, since `rotate` rotates pairs of halves.
    """
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=positions.device) / half
    angles = (positions[:, :, None].float() * (1.0 / theta**exponents)).flatten(1)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


class _Rotate(torch.autograd.Function):
    """Rotation of x [P, heads, d] by cos and sin [P, 1, d] in fp32, rounded once to x's dtype. The
    kernels read and write x's dtype and compute in fp32, so that no copy in fp32 is made of x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        rotated, half = x.new_empty(x.shape), x.size(-1) // 2
        (first, second), (low, high) = x.split(half, -1), (x * cos).split(half, -1)
        torch.addcmul(low, second, sin[..., :half], value=-1, out=rotated[..., :half])
        torch.addcmul(high, first, sin[..., half:], out=rotated[..., half:])
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grads[0], cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding, computed in fp32. x [P, heads, d], cos and sin fp32 [P, 1, d]."""
    return _Rotate.apply(x, cos, sin)


# Layers


class PatchEmbed(nn.Module):
    """Patch embedding: a Conv3d whose stride equals its kernel size, computed as a linear layer
    [D, C * T * P * P].
    """

    def __init__(self, config: Any, size: int, *, bias: bool) -> None:
        super().__init__()
        patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.proj = nn.Linear(patch, size, bias=bias)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches.to(self.proj.weight.dtype))


class PaddedLinear(nn.Linear):
    """Linear layer that computes with zeros around its parameters, because a GPU has slow kernels
    for widths that are no multiple of 8. The parameters have the released shape, and the gradients
    of the zeros are dropped.

    Maps [P, in_features, then any zeros] to [P, out_width], in which zeros follow the features.
    """

    def __init__(self, in_features: int, out_features: int, out_width: int) -> None:
        super().__init__(in_features, out_features)
        self.out_width = out_width

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        rows, columns = self.out_width - self.out_features, x.size(-1) - self.in_features
        if rows or columns:
            weight = F.pad(weight, (0, columns, 0, rows))
        if rows:
            bias = F.pad(bias, (0, rows))
        return F.linear(x, weight, bias)


class Attention(nn.Module):
    """Attention within segments. Input and output are [P, D]."""

    def __init__(
        self, size: int, num_heads: int, *, qkv_bias: bool = True, bias: bool = True
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(size, 3 * size, bias=qkv_bias)
        self.proj = nn.Linear(size, size, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        heads = self.num_heads
        qk, v = self.qkv(x).view(x.size(0), 3 * heads, -1).split([2 * heads, heads], 1)
        q, k = rotate(qk, cos, sin).chunk(2, 1)
        return self.proj(attend(q, k, v, segments).flatten(1))


class PlainAttention(nn.Module):
    """Attention within segments, without a rotary embedding. Input and output are [P, D]."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out_proj = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        return self.out_proj(attend(q, k, v, segments).flatten(1))


class VisionBlock(nn.Module):
    """Transformer block of the family's attention and MLP. norm: Creates a norm of a size."""

    def __init__(
        self, size: int, norm: Callable[[int], nn.Module], attn: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(size), norm(size)
        self.attn, self.mlp = attn, mlp

    def forward(self, x: Tensor, *geometry: Any) -> Tensor:
        """Run the block. geometry: What its attention takes besides x."""
        x = x + self.attn(self.norm1(x), *geometry)
        return x + self.mlp(self.norm2(x))


class MLP(nn.Module):
    """MLP of two linear layers."""

    def __init__(self, size: int, width: int, hidden_act: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, width), nn.Linear(width, size)
        self.act = activation(hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Merger(nn.Module):
    """Merger of the merge^2 patches of a cell to one language token: [P, D] to [P / merge^2, H],
    with exact (erf) GELU.
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
    """Return a LayerNorm with the eps of all families; their configurations do not have it."""
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
    """Return an activation by its name in transformers. Raises ValueError if no family uses it."""
    if name not in ACTIVATIONS:
        raise ValueError(
            f"vision_config.hidden_act: {name!r} is not supported; "
            f"use one of {', '.join(sorted(ACTIVATIONS))}."
        )
    return ACTIVATIONS[name]
