"""Multimodal rotary embedding (M-RoPE) of queries and keys, with positions given per token."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megavlm.models.common.architecture import Rotary


class RotaryTables(NamedTuple):
    """Cosines and sines of the angles of each token, in the dtype of queries and keys. All layers
    share them.
    """

    cos: Tensor  # [t, 1, angles]
    sin: Tensor  # [t, 1, angles]


class MultimodalRotary(nn.Module):
    """Rotary angles of each token."""

    inverse_frequencies: Tensor
    axes: Tensor

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
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
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]

    def tables(self, positions: Tensor, dtype: torch.dtype) -> RotaryTables:
        """Map positions [3, t] to the tables that `rotate` takes."""
        angles = self._angles(positions)[:, None]
        return RotaryTables(angles.cos().to(dtype), angles.sin().to(dtype))

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
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return _turn(query, key, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (query, key), (cos, sin) = gradients, ctx.saved_tensors
        return *_turn(query, key, cos, sin, -1), None, None


def _turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, sign: int) -> tuple[Tensor, ...]:
    together = torch.cat([query, key], dim=1)
    size = 2 * cos.size(-1)
    halves = together[..., :size].unflatten(-1, (2, -1))
    first, second = halves.unbind(-2)
    turned = halves * cos[:, :, None]
    turned[..., 0, :].addcmul_(second, sin, value=-sign)
    turned[..., 1, :].addcmul_(first, sin, value=sign)
    turned = turned.flatten(-2)
    if size < together.size(-1):
        together[..., :size] = turned
        turned = together
    return turned.split([query.size(1), key.size(1)], dim=1)
