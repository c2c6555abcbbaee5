"""Multimodal rotary position embedding (M-RoPE) from positions that the data side has computed."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def chunked_axes(section: Sequence[int]) -> list[int]:
    """Which position axis (0 time, 1 height, 2 width) drives each rotary frequency, in Qwen2-VL and
    Qwen2.5-VL.

    Source: `mrope_section` of the released configurations, consecutive runs of frequencies.
    """
    return [axis for axis, count in enumerate(section) for _ in range(count)]


def interleaved_axes(section: Sequence[int]) -> list[int]:
    """The same in Qwen3-VL: axes take turns, T H W T H W, until height and width have their counts;
    the remaining frequencies are time's.

    Source: transformers `models/qwen3_vl/modeling_qwen3_vl.py`, `recomposition_frequencies`.
    """
    axes = [0] * sum(section)
    for axis in (1, 2):
        for frequency in range(axis, min(3 * section[axis], len(axes)), 3):
            axes[frequency] = axis
    return axes


class MultimodalRotary(nn.Module):
    """Angles of each token: positions [3, T] to [T, 1, 1, head_dim], the form that megatron-core's
    attention applies.
    """

    inverse_frequencies: Tensor
    axes: Tensor

    def __init__(self, head_dim: int, theta: float, axes: Sequence[int]) -> None:
        super().__init__()
        assert len(axes) == head_dim // 2, f"{len(axes)} axes for {head_dim // 2} frequencies"
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inverse_frequencies", 1.0 / theta**exponents, persistent=False)
        self.register_buffer("axes", torch.tensor(axes), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        # fp32 whatever the model's dtype: bf16 holds integers only up to 256
        angles = positions[self.axes].t().float() * self.inverse_frequencies.float()
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]
