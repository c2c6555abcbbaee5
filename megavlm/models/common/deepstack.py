"""DeepStack: tower features of level k are added to the hidden states after language layer k.

The levels of a pack are one tensor of rows [levels x m, 1, H], level after level; m is the number
of image tokens among this rank's hidden states. Layers receive it as megatron-core's `context`:
this is an explicit input of recomputed regions, so that gradients reach every level. Pipeline
stages send the rows that later layers need together with the hidden states, in one tensor.
Source: transformers `models/qwen3_vl/modeling_qwen3_vl.py`.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megavlm.models.common.pack_layout import PackLayout
from megavlm.models.common.routing_replay import ReplayedExperts


class DeepStackLayer(TransformerLayer):
    """Transformer layer that adds its DeepStack level to the hidden states, if it has one and the
    pack has images. A layer with experts replays the pack's routed experts. A layer among
    `captured_layers` leaves its input in the layout.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # megatron-core records a graph of the sums in passes without gradients too. A norm's weight
        # would then keep the hidden states of all layers.
        self.bias_dropout_add_exec_handler = nullcontext

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        levels, layout = kwargs.pop("context"), kwargs["packed_seq_params"]
        layer = self.layer_number - 1
        if layer in self.config.captured_layers and layout.captured is not None:
            layout.captured[layer] = kwargs["hidden_states"].detach()
        if self.is_moe_layer:
            routed_experts = layout.routed_experts
            self.mlp.replayed = (
                None if routed_experts is None else ReplayedExperts.of(routed_experts, layer)
            )
        hidden, _ = super().forward(*args, **kwargs)
        if levels is not None and layer < self.config.deepstack_levels:
            hidden = hidden.index_add(0, layout.vision_rows, layout.level(levels, layer))
        return hidden, levels


@dataclass(kw_only=True)
class StageLayout(PackLayout):
    """Pack layout of a pipeline stage, with the rows that DeepStack levels are added to.

    vision_rows: [m] Rows of the image tokens among this rank's hidden states.
    first_level: Index of the level in the first rows of this stage's levels.
    captured: Input hidden states [t, 1, H] of this stage's layers among `captured_layers`, without
        a graph. None in passes without a draft head, and when the backward pass recomputes layers,
        because then nothing reads them.
    """

    vision_rows: Tensor
    first_level: int
    captured: dict[int, Tensor] | None = None

    def level(self, levels: Tensor, index: int) -> Tensor:
        """Return the rows [m, 1, H] of one level."""
        start = (index - self.first_level) * len(self.vision_rows)
        return levels[start : start + len(self.vision_rows)]


def join_levels(
    hidden: Tensor, levels: Tensor | None, layout: StageLayout, next_layer: int
) -> Tensor:
    """Return the tensor that a stage sends: hidden states [t, 1, H], then the levels of
    `next_layer` and of later layers, m rows each. levels: [levels x m, 1, H] from
    `layout.first_level` on.
    """
    if levels is None:
        return hidden
    # If all levels are used, no rows are appended, but the levels stay in the graph.
    used = (next_layer - layout.first_level) * len(layout.vision_rows)
    return torch.cat([hidden, levels[used:]])


def split_levels(received: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Split a received tensor [t + levels x m, 1, H] into hidden states [t, 1, H], t = `num_rows`,
    and levels.
    """
    hidden, levels = received.split([num_rows, received.size(0) - num_rows])
    return hidden, levels
