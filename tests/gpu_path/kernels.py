"""Norm, rotary embedding and optimizer kernels of Transformer Engine's compiled module in plain
torch. They compute in fp32, as the kernels do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.gpu_path.names import TORCH_DTYPE, DType

Lists = Sequence[Sequence[Tensor]]  # of a multi-tensor kernel: for each argument, its tensors


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: None,
    dtype: DType,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, None, Tensor]:
    """Return the normed rows, and for backward the reciprocal root mean square of each [rows]."""
    assert quantizer is None
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    normed = (x.float() * scale * (weight.float() + zero_centered)).to(TORCH_DTYPE[dtype])
    if out is not None:
        normed = out.copy_(normed)
    return normed, None, scale.flatten()


def rmsnorm_bwd(
    gradient: Tensor,
    x: Tensor,
    scale: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weight."""
    scale = scale.view(*x.shape[:-1], 1)
    normed, weighted = x.float() * scale, gradient.float() * (weight.float() + zero_centered)
    along = (weighted * normed).mean(-1, keepdim=True)
    weight_gradient = (gradient.float() * normed).flatten(0, -2).sum(0)
    return (scale * (weighted - normed * along)).to(x.dtype), weight_gradient.to(weight.dtype)


def fused_rope_forward(
    x: Tensor,
    angles: Tensor,
    start_positions: None,
    layout: type,
    interleaved: bool,
    cu_seqlens: None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Rotate x [t, 1, heads, D], or the first entries of its heads, by the angles [t, 1, 1, D] of
    its tokens.
    """
    assert start_positions is None and cu_seqlens is None
    assert layout.__name__.endswith("NVTE_SBHD") and (cp_size, len(x)) == (1, len(angles))
    turned, rest = x.float().tensor_split([angles.size(-1)], dim=-1)
    pair = -1 if interleaved else -2  # the dim of the two entries that an angle turns
    first, second = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(pair)
    half = torch.stack((-second, first), dim=pair).flatten(-2)
    return torch.cat([turned * angles.cos() + half * angles.sin(), rest], dim=-1).to(x.dtype)


def fused_rope_backward(
    gradient: Tensor,
    angles: Tensor,
    start_positions: None,
    layout: type,
    interleaved: bool,
    cu_seqlens: None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Return the gradient of the input: the gradient rotated back, as both entries of a pair have
    the same angle.
    """
    arguments = (start_positions, layout, interleaved, cu_seqlens, cp_size, cp_rank)
    return fused_rope_forward(gradient, -angles, *arguments)


def multi_tensor_l2norm(
    chunk_size: int, noop: Tensor, lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the norm [1] of all tensors together, and of each where asked."""
    assert len({x.dtype for x in lists[0]}) == 1, "the kernel reads all by the type of the first"
    norms = torch.stack([x.float().norm() for x in lists[0]])
    return norms.norm().view(1), norms if per_tensor else None


def multi_tensor_scale(chunk_size: int, noop: Tensor, lists: Lists, scale: float) -> None:
    """Write the scaled tensors of the first list into those of the second; note what overflows."""
    assert len({x.dtype for x in lists[0]}) == 1, "the kernel reads all by the type of the first"
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)
        if not source.isfinite().all():
            noop.fill_(1)


def multi_tensor_adam(
    chunk_size: int,
    noop: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Make an Adam step (arXiv 1412.6980, or 1711.05101 where `decoupled`).

    `lists`: gradients, parameters, first and second moments, and where parameters are in half
    precision their fp32 masters.
    """
    correction1, correction2 = (1 - beta**step if bias_correction else 1 for beta in (beta1, beta2))
    for gradient, parameter, mean, square, *masters in zip(*lists, strict=True):
        master = masters[0] if masters else parameter
        value, gradient = master.float(), gradient.float()
        if not decoupled:
            gradient = gradient + weight_decay * value
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = (mean / correction1) / ((square / correction2).sqrt() + eps)
        if decoupled:
            update = update + weight_decay * value
        master.copy_(value - lr * update)
        parameter.copy_(master)


def multi_tensor_adam_param_remainder(
    chunk_size: int, noop: Tensor, lists: Lists, *settings: float
) -> None:
    """Make the step of `multi_tensor_adam` on bfloat16 parameters and the lower halves of their
    masters [int16], negative where the upper half was rounded up.
    """
    gradients, parameters, means, squares, remainders = lists
    for gradient, parameter, mean, square, lower in zip(
        gradients, parameters, means, squares, remainders, strict=True
    ):
        assert (parameter.dtype, lower.dtype) == (torch.bfloat16, torch.int16)
        upper = parameter.view(torch.int16).int() - (lower < 0).int()
        master = ((upper << 16) | (lower.int() & 0xFFFF)).view(torch.float32)
        whole = [[gradient], [master], [mean], [square]]
        multi_tensor_adam(chunk_size, noop, whole, *settings)  # type: ignore[arg-type]
        bits = master.view(torch.int32)
        lower.copy_(bits & 0xFFFF)  # wraps
        parameter.view(torch.int16).copy_((bits >> 16) + (lower < 0).int())
