"""Attention over packs of trees, in megatron-core's layers. A token attends to the earlier tokens
of its own segment and to the segments that its segment continues.

With context parallelism, a rank computes the queries of its part of the pack with the keys and
values of the whole pack.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megavlm.models.common.attention_backends import choose_backend
from megavlm.models.common.config import LanguageConfig
from megavlm.models.common.pack_layout import PackLayout
from megavlm.models.common.rotary import rotate


class TreeAttention(MegatronModule):
    """Core attention with megatron-core's contract: query [t, 1, heads, D] in, [t, 1, heads x D]
    out. It applies the rotary embedding too if the layout has its tables. Raises ValueError for a
    backend that cannot run here.
    """

    def __init__(
        self,
        config: LanguageConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.context_group = pg_collection.cp
        self.backend = choose_backend(config.tree_attention, config.params_dtype)

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
        layout = packed_seq_params
        assert layout is not None and query.size(1) == 1
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        if layout.rotary is not None:
            query, key = rotate(query, key, layout.rotary)
        if self.context_group.size() > 1:
            key, value = gather_context(key, value, layout.gather_index, self.context_group)
        assert (len(query), len(key)) == (len(layout.token_index), layout.num_tokens)
        output = self.backend(query, key, value, layout, self.scale)
        return output.reshape(len(query), 1, -1)


def gather_context(
    key: Tensor, value: Tensor, gather_index: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Gather keys and values of every context rank, [t, heads, D] each, in pack order
    [T, heads, D]. Collective.

    In the backward pass, a rank receives the sum of all ranks' gradients of its keys and values.
    """
    together = torch.stack([key, value], dim=1)  # one collective for both
    everything = gather_from_sequence_parallel_region(together, group=group)
    keys, values = everything.index_select(0, gather_index).unbind(1)
    return keys, values


class GatedSelfAttention(SelfAttention):
    """Self-attention whose output is gated head by head (`attention_output_gate`)."""

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        query, key, value, gate = super().get_query_key_value_tensors(*args, **kwargs)
        ranks_per_group = self.world_size // self.config.num_query_groups
        if ranks_per_group > 1:
            # megatron-core 0.16.1 selects this rank's queries of the shared group, not its gates.
            gate = gate.chunk(ranks_per_group, dim=2)[
                self.pg_collection.tp.rank() % ranks_per_group
            ]
        return query, key, value, gate
