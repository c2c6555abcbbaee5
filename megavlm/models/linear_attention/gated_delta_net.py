"""Gated DeltaNet over packs of trees. It replaces self-attention in megatron-core's layers.

Rows of `in_proj` and channels of the convolution are grouped by key head with its r value heads:
[q, k, v x r, z x r, b x r, a x r] and [q, k, v x r]. Tensor ranks therefore cut plain blocks of
rows, and context ranks cut these blocks again: a context rank computes all tokens for a part of its
tensor rank's heads. Two all-to-alls exchange tokens for heads and back.

Source: transformers `models/qwen3_5/modeling_qwen3_5.py`, `Qwen3_5GatedDeltaNet`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_to_all,
    checkpoint,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

from megavlm.models.common.config import LanguageConfig
from megavlm.models.common.pack_layout import PackLayout
from megavlm.models.linear_attention.delta_rule import (
    choose_rule,
    tree_convolution,
    tree_delta_rule,
)
from megavlm.models.linear_attention.tree_scan import tree_scan


@dataclass
class GatedDeltaNetSubmodules:
    """Linear layers of Gated DeltaNet.

    in_proj: Column-parallel. It includes the layer's norm if the two are fused.
    out_proj: Row-parallel.
    """

    in_proj: Any
    out_proj: Any


class GatedDeltaNet(MegatronModule):
    """Layer with the interface of megatron-core's self-attention. It maps hidden states [t, 1, H]
    ([t / tp, 1, H] with sequence parallelism) to the same shape, and returns no bias.
    """

    def __init__(
        self,
        config: LanguageConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        *,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.pg_collection = pg_collection
        self.num_key_heads = config.linear_num_key_heads
        self.num_copies = config.linear_num_value_heads // config.linear_num_key_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        linear: dict[str, Any] = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": pg_collection.tp,
        }
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            self.num_key_heads * sum(self.group_rows),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **linear,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            config.linear_num_value_heads * self.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **linear,
        )
        groups = self.num_key_heads // pg_collection.tp.size()
        heads = groups * self.num_copies
        channels = groups * sum(self.group_rows[:3])
        empty = partial(torch.empty, dtype=config.params_dtype)
        self.conv_weight = nn.Parameter(empty(channels, config.linear_conv_kernel_dim))
        self.dt_bias = nn.Parameter(empty(heads))
        # In fp32 for every dtype of the model, because it is exponentiated twice.
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.norm_weight = nn.Parameter(empty(self.value_dim))
        for parameter in (self.conv_weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        with torch.no_grad():
            config.init_method(self.conv_weight)
            self.dt_bias.fill_(1)
            self.A_log.uniform_(0.01, 16).log_()
            self.norm_weight.fill_(1)
        self.rule = choose_rule()
        self.recompute = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Number of rows of `in_proj` for q, k, v, z, b and a in the group of a key head."""
        values = self.num_copies * self.value_dim
        return (self.key_dim, self.key_dim, values, values, self.num_copies, self.num_copies)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackLayout,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layout, group = packed_seq_params, self.pg_collection.cp
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        if group.size() > 1:
            projected = tokens_to_heads(projected, layout.gather_index, group)
        mix = partial(self._mix, layout=layout)
        output = checkpoint(mix, False, projected) if self.recompute else mix(projected)
        if group.size() > 1:
            output = heads_to_tokens(output, layout.gather_index, group)
        result: tuple[Tensor, Tensor | None] = self.out_proj(output.unsqueeze(1))
        return result

    def _mix(self, projected: Tensor, layout: PackLayout) -> Tensor:
        """Compute all tokens of the pack for this rank's heads: [T, rows] to [T, heads x V]."""
        rows = self.group_rows
        groups = projected.unflatten(1, (-1, sum(rows)))
        mixed, z, b, a = groups.split([sum(rows[:3]), *rows[3:]], dim=-1)
        scan = tree_scan(layout, self.conv_weight.size(1))
        mixed = F.silu(tree_convolution(mixed.flatten(1), self._mine(self.conv_weight), scan))
        query, key, value = mixed.unflatten(1, (-1, sum(rows[:3]))).split(rows[:3], dim=-1)
        value, z = (x.reshape(len(x), -1, self.value_dim) for x in (value, z))
        step = F.softplus(a.flatten(1).float() + self._mine(self.dt_bias).float())
        decay = -self._mine(self.A_log).float().exp() * step
        beta = b.flatten(1).sigmoid()
        output = tree_delta_rule(query, key, value, decay, beta, scan, self.rule)
        return self._gated_norm(output, z).flatten(1)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        # Each tensor rank applies the weight to its heads, so that the gradient is a sum over the
        # tensor axis.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.pg_collection.tp)
        normed = F.rms_norm(x.float(), (self.value_dim,), eps=self.config.layernorm_epsilon)
        return (weight * normed.to(x.dtype) * F.silu(gate.float())).to(x.dtype)

    def _mine(self, parameter: Tensor) -> Tensor:
        """Return this context rank's part of a tensor rank's rows."""
        group = self.pg_collection.cp
        return parameter.chunk(group.size())[group.rank()]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        assert metadata is not None
        state = make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters(recurse=False)),
            prefix,
            dict.fromkeys(("conv_weight", "dt_bias", "A_log"), 0),
            sharded_offsets,
            tp_group=self.pg_collection.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, self.pg_collection.tp
            )
        return state


def tokens_to_heads(x: Tensor, gather_index: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange this rank's tokens with all columns [t, C] for all tokens in pack order with this
    rank's part of the columns [T, C / ranks]. Collective.
    """
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1)
    return all_to_all(group, parts.contiguous()).flatten(0, 1).index_select(0, gather_index)


def heads_to_tokens(x: Tensor, gather_index: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all tokens in pack order with this rank's part of the columns [T, C / ranks] for
    this rank's tokens with all columns [t, C]. Collective.
    """
    by_rank = x.index_select(0, gather_index.argsort()).unflatten(0, (group.size(), -1))
    return all_to_all(group, by_rank.contiguous()).transpose(0, 1).flatten(1)
