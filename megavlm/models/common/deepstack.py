"""DeepStack: tower features of level k are added to the hidden states after language layer k.

The levels of a pack are one tensor of rows [levels x m, 1, H], level after level; m is the number
of image tokens among the hidden states that this rank holds. Layers get it as megatron-core's
`context`, which is an explicit input of recomputed regions, so gradients reach every level. Between
pipeline stages the rows that later layers need travel behind the hidden states in one tensor.
Source: transformers `models/qwen3_vl/modeling_qwen3_vl.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megavlm.models.common.pack_layout import PackLayout


class DeepStackLayer(TransformerLayer):
    """A layer that adds its level, where it has one and the pack has images."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        levels, layout = kwargs.pop("context"), kwargs["packed_seq_params"]
        hidden, _ = super().forward(*args, **kwargs)
        layer = self.layer_number - 1
        if levels is not None and layer < self.config.deepstack_levels:
            hidden = hidden.index_add(0, layout.vision_rows, layout.level(levels, layer))
        return hidden, levels


@dataclass(kw_only=True)
class StageLayout(PackLayout):
    """What the layers of a stage know of a pack: who attends whom, and where its levels go.

    vision_rows [m]: the image tokens among this rank's hidden states. first_level: the level that
    the first rows of this stage's levels belong to.
    """

    vision_rows: Tensor
    first_level: int

    def level(self, levels: Tensor, index: int) -> Tensor:
        """The rows [m, 1, H] of one level."""
        start = (index - self.first_level) * len(self.vision_rows)
        return levels[start : start + len(self.vision_rows)]


def join(hidden: Tensor, levels: Tensor | None, layout: StageLayout, next_layer: int) -> Tensor:
    """What a stage sends: hidden states, then the levels of `next_layer` and later ones."""
    if levels is None:
        return hidden
    # All of them may be used by now: then no row follows, and the levels keep their gradient's way.
    used = (next_layer - layout.first_level) * len(layout.vision_rows)
    return torch.cat([hidden, levels[used:]])


def separate(received: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """What a stage received, as hidden states of `num_rows` rows and levels."""
    hidden, levels = received.split([num_rows, received.size(0) - num_rows])
    return hidden, levels
