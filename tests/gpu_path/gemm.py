"""Matrix products of Transformer Engine's compiled module in plain torch, as cuBLAS computes them:
operands are column-major, so that `A` is the second factor of torch's product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.gpu_path.names import TORCH_DTYPE, DType


def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: None,
    out_dtype: DType | None,
    bias: Tensor | None,
    bias_dtype: DType,
    gelu: bool,
    gelu_in: None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **communication: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """Return op(B) @ op(A) with the bias, or in backward the bias's gradient; `out` receives or
    accumulates the product where it is given.
    """
    assert quantizer is None and not gelu and communication["comm_overlap"] is None
    assert (communication["alpha"], communication["beta"]) == (1.0, 1.0 if accumulate else 0.0)
    product = _product(A, transa, B, transb)
    if not transb:
        product = product.view(*B.shape[:-1], -1)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = B.flatten(0, -2).sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias
    if out is None:
        return (
            product.to(A.dtype if out_dtype is None else TORCH_DTYPE[out_dtype]),
            bias_grad,
            None,
            None,
        )
    _write(out, product, accumulate)
    return out, bias_grad, None, None


def te_general_grouped_gemm(
    A: Sequence[Tensor],
    transa: bool,
    B: Sequence[Tensor],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: DType,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_dtype: DType,
    single_output: bool,
    gelu_input: Sequence[Tensor],
    grad: bool,
    workspaces: Sequence[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> Sequence[Tensor]:
    """Compute a product for each pair of operands. `single_output`: the outputs are `m_splits` rows
    each of the first of `out`.
    """
    outputs = out[0].split(m_splits) if single_output else out
    assert not any(x.numel() for x in bias), "no linear of experts has a bias"
    for a, b, target in zip(A, B, outputs, strict=True):
        _write(target, _product(a, transa, b, transb), accumulate)
    return bias


def get_num_cublas_streams() -> int:
    return 4


def _product(A: Tensor, transa: bool, B: Tensor, transb: bool) -> Tensor:
    assert A.dtype == B.dtype, f"cuBLAS takes operands of one type, not {A.dtype} and {B.dtype}"
    A, B = A.flatten(0, -2), B.flatten(0, -2)
    return torch.mm(B.t() if transb else B, A.t() if transa else A)


def _write(out: Tensor, product: Tensor, accumulate: bool) -> None:
    product = product.to(out.dtype).view(out.shape)
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)
