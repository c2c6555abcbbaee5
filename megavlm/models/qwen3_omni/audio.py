"""Audio tower of Qwen3-Omni: three convolutions over chunks of log-mel frames, attention within
windows of several chunks, and an MLP that projects into the language model.

Source: transformers `models/qwen3_omni_moe/modeling_qwen3_omni_moe.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.models.common.vision_layers import MLP, PlainAttention, Segments, VisionBlock
from megavlm.models.qwen3_omni.config import count_tokens, halved


class Projector(nn.Module):
    """MLP behind the tower: [P, D] to [P, H]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.proj1 = nn.Linear(config.d_model, config.d_model)
        self.proj2 = nn.Linear(config.d_model, config.output_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj2(F.gelu(self.proj1(x)))


def sinusoids(length: int, size: int) -> Tensor:
    """Return the positions [length, size] of a chunk's tokens: sines, then cosines."""
    step = math.log(10_000) / (size // 2 - 1)
    angles = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(size // 2).float())
    return torch.cat([angles.sin(), angles.cos()], 1)


class AudioTower(nn.Module):
    """Tower that maps the log-mel frames [F, mel] of clips to hidden states [P, D], which a
    Projector maps into the language model.
    """

    def __init__(self, config: Any) -> None:
        """Build the tower from transformers' Qwen3OmniMoeAudioEncoderConfig."""
        super().__init__()
        channels, size = config.downsample_hidden_size, config.d_model
        self.chunk = 2 * config.n_window
        self.window = halved(self.chunk) * (config.n_window_infer // self.chunk)
        self.batch = config.conv_chunksize
        self.conv2d1 = nn.Conv2d(1, channels, 3, 2, padding=1)
        self.conv2d2 = nn.Conv2d(channels, channels, 3, 2, padding=1)
        self.conv2d3 = nn.Conv2d(channels, channels, 3, 2, padding=1)
        self.conv_out = nn.Linear(channels * halved(config.num_mel_bins), size, bias=False)
        self.blocks = nn.ModuleList(
            VisionBlock(
                size,
                nn.LayerNorm,
                PlainAttention(size, config.encoder_attention_heads),
                MLP(size, config.encoder_ffn_dim, "gelu"),
            )
            for _ in range(config.encoder_layers)
        )
        self.post_layernorm = nn.LayerNorm(size)

    def forward(
        self, clips: Sequence[Tensor], run_block: Callable[[nn.Module, Tensor, Segments], Tensor]
    ) -> Tensor:
        """Return the hidden states of clips [F, mel], clip after clip. run_block: Runs hidden
        states through a block that attends within segments.
        """
        x = torch.cat([self._tokens(clip) for clip in clips])
        windows: list[int] = []
        for clip in clips:
            whole, rest = divmod(count_tokens(len(clip), self.chunk), self.window)
            windows += [self.window] * whole + [rest] * (rest > 0)
        segments = Segments(tuple(windows), x.device)
        for block in self.blocks:
            x = run_block(block, x, segments)
        return self.post_layernorm(x)

    def _tokens(self, clip: Tensor) -> Tensor:
        """Return the tokens [P, D] of a clip [F, mel] before attention. The convolutions see zeros
        behind a clip's last chunk up to the length of the others, as in training; tokens of zeros
        only are dropped.
        """
        chunks = clip.to(self.conv_out.weight.dtype).split(self.chunk)
        filled = torch.stack([F.pad(x, (0, 0, 0, len(chunks[0]) - len(x))).t() for x in chunks])
        x = torch.cat([self._convolved(part) for part in filled[:, None].split(self.batch)])
        x = x + sinusoids(x.size(1), x.size(2)).to(x)
        return x.flatten(0, 1)[: count_tokens(len(clip), self.chunk)]

    def _convolved(self, chunks: Tensor) -> Tensor:
        """Return tokens [N, t, D] of chunks [N, 1, mel, frames]."""
        for convolution in (self.conv2d1, self.conv2d2, self.conv2d3):
            chunks = F.gelu(convolution(chunks))
        return self.conv_out(chunks.permute(0, 3, 1, 2).flatten(2))
