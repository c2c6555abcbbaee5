"""LoRA adapters on experts on a CPU. SGLang 0.5.23 has them as Triton kernels only, and cuts them
without regard to the rows that it pads experts with on a CPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from torch import Tensor


def install(module: Any) -> None:
    """Replace the kernels of `module`, SGLang's layers with adapters."""
    layer = module.FusedMoEWithLoRA
    cut_a, cut_b = layer.slice_moe_lora_a_weights, layer.slice_moe_lora_b_weights

    def cut_padded_a(self: Any, a: Tensor, rank: int, linear: str) -> Tensor:
        if linear == "down_proj_moe":
            a = F.pad(a, (0, _width(self) - a.size(2)))
        return cut_a(self, a, rank, linear)

    def cut_padded_b(self: Any, b: Tensor, rank: int, linear: str) -> Tensor:
        if linear == "gate_up_proj_moe":
            halves = (F.pad(x, (0, 0, 0, _width(self) - x.size(1))) for x in b.chunk(2, dim=1))
            b = torch.cat([*halves], dim=1)
        return cut_b(self, b, rank, linear)

    layer.slice_moe_lora_a_weights, layer.slice_moe_lora_b_weights = cut_padded_a, cut_padded_b
    layer._forward_with_lora = _forward


def _width(layer: Any) -> int:
    """Return the padded width of an expert, over all ranks."""
    width: int = layer.intermediate_size_per_partition * layer.tp_size
    return width


def _forward(layer: Any, hidden: Tensor, topk_output: Any, info: Any, **_: Any) -> Tensor:
    """Return the sum of each token's experts [T, H], with the adapter of its request."""
    base = layer.base_layer
    given = base.dispatcher.dispatch(hidden_states=hidden, topk_output=topk_output)
    x, (weights, experts, _) = given.hidden_states, given.topk_output
    output = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        token, choice = (experts == expert).nonzero(as_tuple=True)
        slots = info.token_lora_mapping[token]  # -1 without an adapter
        rows = F.linear(x[token], base.w13_weight[expert])
        gate_up = (info.gate_up_lora_a_weights, info.gate_up_lora_b_weights)
        _add(rows, x[token], slots, expert, *gate_up)
        gate, up = rows.chunk(2, dim=1)
        inner = F.silu(gate) * up
        rows = F.linear(inner, base.w2_weight[expert])
        down = (info.down_lora_a_weights, info.down_lora_b_weights)
        _add(rows, inner, slots, expert, *down)
        output.index_add_(0, token, rows * weights[token, choice, None].to(rows.dtype))
    result: Tensor = base.dispatcher.combine(StandardCombineInput(hidden_states=output))
    return result


def _add(rows: Tensor, x: Tensor, slots: Tensor, expert: int, a: Tensor, b: Tensor) -> None:
    """Add B A x of each row's adapter. a: [slots, experts, ranks, columns], with the ranks of gate
    before the ranks of up. b: [slots, experts, rows, rank], already scaled.
    """
    parts = a.size(2) // b.size(3)
    for slot in slots[slots >= 0].unique().tolist():
        mine = slots == slot
        downs = F.linear(x[mine], a[slot, expert]).chunk(parts, dim=1)
        ups = b[slot, expert].chunk(parts)
        rows[mine] += torch.cat([F.linear(x, y) for x, y in zip(downs, ups, strict=True)], dim=1)
