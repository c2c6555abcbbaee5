"""transformers' models of linear attention compute in plain torch where kernels are installed."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megavlm.models.linear_attention.in_transformers import use_plain_torch
from tests.support.families import build_in_transformers, small_config


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_transformers_computes_on_a_cpu_where_it_has_kernels_for_a_gpu(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_in_transformers(small_config(family), "cpu")
    module = inspect.getmodule(type(model))
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.setattr(module, name, kernel_in_place_of(getattr(module, name)))
    ids = torch.arange(9)[None] + 20
    with pytest.raises(RuntimeError, match="no GPU"):
        model(input_ids=ids)
    use_plain_torch(model)
    assert model(input_ids=ids).logits.isfinite().all()


def kernel_in_place_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that refuses a CPU's tensors, wrapped as transformers wraps its own."""

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no GPU")

    return kernel
