"""Qwen2-VL's vision tower: LayerNorm, attention over whole frames, an MLP with quick-GELU.

Source: transformers `models/qwen2_vl/modeling_qwen2_vl.py`. In this family's `vision_config`,
`embed_dim` is the tower's hidden size and `hidden_size` the language model's.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from megavlm.data.media.image_processing import Grid
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_layers import (
    MLP,
    Attention,
    Merger,
    PatchEmbed,
    Segments,
    VisionBlock,
    layer_norm,
    pack_values,
    patch_positions,
    rotary_angles,
    rotary_theta,
)


class VisionTower(Tower):
    """Tower that maps patches [P, C*T*P*P] in merge order and their grids to features
    [P / merge^2, H].
    """

    def __init__(self, hf_config: Any) -> None:
        """Build the tower from the `vision_config` of a Qwen2-VL configuration."""
        super().__init__()
        config = hf_config.vision_config
        self.merge_size = config.spatial_merge_size
        self.feature_size = config.hidden_size
        size = config.embed_dim
        self.head_dim = size // config.num_heads
        self.theta = rotary_theta(config)
        self.patch_embed = PatchEmbed(config, size, bias=False)
        self.blocks = nn.ModuleList(
            VisionBlock(
                size,
                layer_norm,
                Attention(size, config.num_heads),
                MLP(size, int(size * config.mlp_ratio), config.hidden_act),
            )
            for _ in range(config.depth)
        )
        self.merger = Merger(layer_norm(size), size * self.merge_size**2, self.feature_size)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        device = patches.device
        positions = pack_values(grids, lambda h, w: patch_positions(h, w, self.merge_size))
        rotary = rotary_angles(positions.to(device), self.head_dim, self.theta)
        segments = [Segments.frames(grids, device)] * len(self.blocks)
        x, _ = self.run_blocks(self.patch_embed(patches), segments, rotary)
        return self.merger(x)
