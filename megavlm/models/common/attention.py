"""Core attention over packs of trees: a token attends its own past and that of the segments it
descends from.

`PackLayout` travels through megatron-core as its packed-sequence parameters. Its `qkv_format` is
"sbhd", since positions are given per token and megatron's "thd" rotary code would count them anew
for each sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


@dataclass
class PackLayout(PackedSeqParams):
    """Who attends whom in a pack of T tokens.

    segment_ids [T]; ancestors [S, S], row attends column; tree_bounds: first token of each tree,
    then T.
    """

    qkv_format: str = "sbhd"
    segment_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    ancestors: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.bool))
    tree_bounds: tuple[int, ...] = ()

    @cached_property
    def tree_masks(self) -> list[Tensor | None]:
        """Per tree [L, L], true where the row attends the column; None for a plain causal sequence.
        All layers share it.
        """
        masks: list[Tensor | None] = []
        for start, end in self.trees:
            ids_L = self.segment_ids[start:end]
            causal_LL = torch.ones(
                end - start, end - start, dtype=torch.bool, device=ids_L.device
            ).tril()
            masks.append(self.ancestors[ids_L[:, None], ids_L[None, :]] & causal_LL)
        return masks

    @property
    def trees(self) -> list[tuple[int, int]]:
        return list(zip(self.tree_bounds[:-1], self.tree_bounds[1:], strict=True))


def sdpa(query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float) -> Tensor:
    """PyTorch's scaled dot product attention, tree by tree. [T, heads, D] with [T, kv heads, D]
    gives [T, heads, D].
    """
    outputs = []
    for (start, end), mask in zip(layout.trees, layout.tree_masks, strict=True):
        q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        gqa = q.size(1) != k.size(1)
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa
        )
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


Backend = Callable[[Tensor, Tensor, Tensor, PackLayout, float], Tensor]


class TreeAttention(MegatronModule):
    """megatron-core's core-attention contract: query [T, 1, heads, D] in, [T, 1, heads x D] out."""

    backend: Backend = staticmethod(sdpa)

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackLayout | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None and query.size(1) == 1
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        return self.backend(q, k, v, packed_seq_params, self.scale).reshape(query.size(0), 1, -1)
