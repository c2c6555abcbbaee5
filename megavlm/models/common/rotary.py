"""Multimodal rotary embedding (M-RoPE) of queries and keys, with positions given per token."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megavlm.models.common.architecture import Rotary


class RotaryTables(NamedTuple):
    """Cosines and sines of the angles of each token, in the dtype of queries and keys. All layers
    share them.

    interleaved: True if an angle turns two neighbouring entries of a head, False if it turns an
        entry of the first half and the same entry of the second half.
    """

    cos: Tensor  # [t, 1, angles]
    sin: Tensor  # [t, 1, angles]
    interleaved: bool = False


class MultimodalRotary(nn.Module):
    """Rotary angles of each token. interleaved: See `RotaryTables`."""

    inverse_frequencies: Tensor
    axes: Tensor

    def __init__(self, rotary: Rotary, *, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved
        head_dim, axes = rotary.head_dim, rotary.axes
        assert len(axes) == head_dim // 2, f"{len(axes)} axes for {head_dim // 2} frequencies"
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inverse_frequencies", 1.0 / rotary.theta**exponents, persistent=False)
        self.register_buffer("axes", torch.tensor(axes), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """Map positions [3, t] to angles [t, 1, 1, head_dim] in the form that megatron-core's fused
        kernel takes, which is Transformer Engine's.
        """
        angles = self._angles(positions)
        if self.interleaved:
            return angles.repeat_interleave(2, dim=-1)[:, None, None, :]
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]

    def tables(self, positions: Tensor, dtype: torch.dtype) -> RotaryTables:
        """Map positions [3, t] to the tables that `rotate` takes."""
        angles = self._angles(positions)[:, None]
        return RotaryTables(angles.cos().to(dtype), angles.sin().to(dtype), self.interleaved)

    def _angles(self, positions: Tensor) -> Tensor:
        # In fp32 for every dtype of the model: bf16 represents integers exactly only up to 256.
        return positions[self.axes].t().float() * self.inverse_frequencies.float()


def rotate(query: Tensor, key: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    """Return queries [t, heads, D] and keys [t, kv heads, D] turned by their tokens' angles. The
    dimensions after the first 2 x angles stay as they are.
    """
    turned: tuple[Tensor, Tensor] = _Rotation.apply(query, key, *tables)
    return turned


class _Rotation(torch.autograd.Function):
    """Rotation of queries and keys together. Its gradient is the rotation back, which needs the
    only tables, and neither queries nor keys.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(query, key, RotaryTables(cos, sin, interleaved), 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key = gradients
        cos, sin = ctx.saved_tensors
        tables = RotaryTables(cos, sin, ctx.interleaved)
        return *_turn(query, key, tables, -1), None, None, None


def _turn(query: Tensor, key: Tensor, tables: RotaryTables, sign: int) -> tuple[Tensor, ...]:
    cos, sin, interleaved = tables
    together = torch.cat([query, key], dim=1)
    size = 2 * cos.size(-1)
    pair = -1 if interleaved else -2  # the dim of the two entries that an angle turns
    pairs = together[..., :size].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(pair)
    turned = pairs * cos.unsqueeze(pair)
    turned.select(pair, 0).addcmul_(second, sin, value=-sign)
    turned.select(pair, 1).addcmul_(first, sin, value=sign)
    turned = turned.flatten(-2)
    if size < together.size(-1):
        together[..., :size] = turned
        turned = together
    return turned.split([query.size(1), key.size(1)], dim=1)
