"""Linear layers and experts in block FP8 on a CPU. SGLang 0.5.23 has kernels for them on GPUs, and
on CPUs with AMX, for which it repacks the weights.

Here weights stay as they were loaded, and each forward takes their product with their scales, in
the dtype of the activations. These are not quantised, as they are on a GPU.
"""

from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def install(module: Any) -> None:
    """Replace the kernels of `module`, layers.quantization.fp8."""
    for method, apply in ((module.Fp8LinearMethod, _linear), (module.Fp8MoEMethod, _experts)):
        method.process_weights_after_loading = lambda self, layer: None
        method.apply = apply


def _linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = dequantised(layer.weight, layer.weight_scale_inv, self.weight_block_size)
    return F.linear(x, weight.to(x.dtype), bias)


def _experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, block = dispatch_output.hidden_states, self.weight_block_size
    plain = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=dequantised(layer.w13_weight, layer.w13_weight_scale_inv, block).to(x.dtype),
        w2_weight=dequantised(layer.w2_weight, layer.w2_weight_scale_inv, block).to(x.dtype),
    )
    output = moe_forward_native(plain, x, dispatch_output.topk_output, self.moe_runner_config)
    return StandardCombineInput(hidden_states=output)


def dequantised(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the float32 weights of numbers [..., R, C] in e4m3 and the scales of their blocks."""
    for dim, size in ((-2, block[0]), (-1, block[1])):
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
    return values.float() * scales
