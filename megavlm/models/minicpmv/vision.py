"""Vision tower of MiniCPM-V 4.6 (SigLIP 2): images of any size, whose patches take the nearest
learned positions. Two mergers each join windows of 2 x 2: one within the tower, whose attention is
within windows, and one behind it.

Source: transformers `models/minicpmv4_6/modeling_minicpmv4_6.py`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.data.media.image_processing import Grid
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_layers import (
    MLP,
    PaddedLinear,
    PlainAttention,
    Segments,
    VisionBlock,
    activation,
    cache_frames,
    layer_norm,
    merge_order,
    pack_values,
)
from megavlm.models.minicpmv.config import SIDE, WINDOW


class WindowMerger(nn.Module):
    """Merger within the tower: attention within windows, then an MLP over the patches of each:
    [P, D] in the order of windows to [P / 4, D].
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps, count = config.hidden_size, config.layer_norm_eps, WINDOW**2
        self.norm1, self.norm2 = nn.LayerNorm(size, eps=eps), nn.LayerNorm(count * size, eps=eps)
        self.attn = PlainAttention(size, config.num_attention_heads)
        width = count * config.intermediate_size
        self.linear_1, self.linear_2 = nn.Linear(count * size, width), nn.Linear(width, size)
        self.act = activation("gelu_pytorch_tanh")

    def forward(self, x: Tensor) -> Tensor:
        count = WINDOW**2
        windows = Segments((count,) * (len(x) // count), x.device)
        x = (x + self.attn(self.norm1(x), windows)).unflatten(0, (-1, count))
        return self.linear_2(self.act(self.linear_1(self.norm2(x.flatten(1))))) + x.mean(1)


class Merger(nn.Module):
    """Merger behind the tower: an MLP with a norm before it: [P, D] to [P / 4, H]."""

    def __init__(self, size: int, out_size: int) -> None:
        super().__init__()
        self.merged_size = merged = WINDOW**2 * size
        self.norm = layer_norm(merged)
        self.linear_1, self.linear_2 = nn.Linear(merged, merged), nn.Linear(merged, out_size)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        cells = x.view(-1, self.merged_size)
        return self.linear_2(self.act(self.linear_1(self.norm(cells))))


@cache_frames
def nearest_positions(height: int, width: int, side: int) -> Tensor:
    """Return the entry [h * w] of a table of side x side positions for each patch of a frame, in
    merge order.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    rows, columns = (
        torch.bucketize(torch.arange(size) / size, bounds, right=True) for size in (height, width)
    )
    return merge_order(rows[:, None] * side + columns, SIDE)


class VisionTower(Tower):
    """Tower that maps the patches [P, C*P*P] of images, slices and frames in merge order, and their
    grids, to features [P / 16, H].
    """

    separate_qkv = True

    def __init__(self, hf_config: Any) -> None:
        """Build the tower from transformers' MiniCPMV4_6Config."""
        super().__init__()
        config = hf_config.vision_config
        self.merge_size, self.feature_size = SIDE, hf_config.text_config.hidden_size
        size, patch = config.hidden_size, config.patch_size
        norm = partial(nn.LayerNorm, eps=config.layer_norm_eps)
        self.table_side = config.image_size // patch
        self.blocks_before = config.insert_layer_id + 1
        self.patch_embed = PaddedLinear(config.num_channels * patch**2, size, size)
        self.position_embedding = nn.Embedding(self.table_side**2, size)
        self.blocks = nn.ModuleList(
            VisionBlock(
                size,
                norm,
                PlainAttention(size, config.num_attention_heads),
                MLP(size, config.intermediate_size, config.hidden_act),
            )
            for _ in range(config.num_hidden_layers)
        )
        self.window_merger = WindowMerger(config)
        self.post_layernorm = norm(size)
        self.merger = Merger(size, self.feature_size)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        device, before = patches.device, self.blocks_before
        places = pack_values(grids, lambda h, w: nearest_positions(h, w, self.table_side))
        patches = patches.to(self.position_embedding.weight.dtype)
        x = self.patch_embed(F.pad(patches, (0, -patches.size(1) % 8)))
        x = x + self.position_embedding(places.to(device))
        x, _ = self.run_blocks(x, [Segments.frames(grids, device)] * before)
        # From lines within a token's square to its four windows.
        square = x.unflatten(0, (-1, WINDOW, WINDOW, WINDOW, WINDOW))
        x = self.window_merger(square.transpose(2, 3).flatten(0, 4))
        merged = Segments.pack(grids, lambda h, w: [h * w // WINDOW**2], device)
        after = len(self.blocks) - before
        x, _ = self.run_blocks(x, [merged] * after, first=before)
        return self.merger(self.post_layernorm(x))
