"""A pass in bf16 as on a GPU: the tower's images in one variable-length kernel, and packs of trees
in flash attention; each kernel is written out in tests/support/kernels.py.
"""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from megavlm.models.common import vision_layers
from megavlm.models.common.config import ModelOptions
from tests.parity.cases import packs_of
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import distinct_images
from tests.parity.runs import Run
from tests.parity.table import LAYOUTS
from tests.support.fork import launch
from tests.support.kernels import DotProductAttention

CAUSAL, WHOLE = (-1, 0), (-1, -1)  # windows: of the language model's calls, and of the tower's
BF16, FP32 = torch.bfloat16, torch.float32


def one_pass(
    folder: Path, config: Any, layout: str, dtype: torch.dtype, attention: str, dense_tower: bool
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return the calls of the kernel by the language model and by the tower, and the logits of all
    targets and all gradients by name.
    """
    ranks = LAYOUTS[layout]
    groups = [inputs_of(folder).sequences("branches"), inputs_of(folder).sequences("mixed")]
    images = distinct_images([case for group in groups for case in group])
    options = ModelOptions(
        dtype=dtype, freeze_tower=False, freeze_merger=False, attention=attention
    )
    with ExitStack() as stack:
        kernel = varlen.varlen_attn  # whose signature is read
        patch = mock.patch.object(varlen, "varlen_attn", autospec=True, side_effect=kernel)
        spy = stack.enter_context(patch)
        if dense_tower:
            no_gpu = SimpleNamespace(has_gpu=lambda: False)
            stack.enter_context(mock.patch.object(vision_layers, "platform", no_gpu))
        te = "transformer_engine.pytorch.DotProductAttention"
        stack.enter_context(mock.patch(te, DotProductAttention))
        run = Run.start(folder, config, ranks, options, images)
        packs = packs_of(groups, config, ranks)
        logits = torch.cat(run.logits(packs))
        gradients = run.backward(packs)
    windows = [call.kwargs["window_size"] for call in spy.call_args_list]
    calls = {"language": windows.count(CAUSAL), "tower": windows.count(WHOLE)}
    parts = {str(name): gradient.double() for name, gradient in gradients.items()}
    return calls, {"logits": logits.double()} | parts


@pytest.mark.parametrize(
    ("family", "layout", "attention"),
    [
        ("qwen2_5_vl", "one rank", "flash"),
        ("qwen2_5_vl", "CP2", "flash"),
        ("qwen3_vl", "TP2+SP", "transformer_engine"),
    ],
)
def test_kernels_equal_dense_attention(family: str, layout: str, attention: str) -> None:
    """As near to fp32 as dense attention in bf16 is."""
    folder = model_folder(family)
    inputs, size = inputs_of(folder), LAYOUTS[layout].world_size
    arguments = (size, one_pass, inputs.folder, inputs.config, layout)
    exact = launch(*arguments, FP32, "sdpa", True)
    dense = launch(*arguments, BF16, "sdpa", True)
    kernels = launch(*arguments, BF16, attention, False)
    for (_, expected), (none, plain), (calls, found) in zip(exact, dense, kernels, strict=True):
        assert none == {"language": 0, "tower": 0}
        assert calls["tower"] > 0 and (calls["language"] > 0) == (attention == "flash")
        assert found.keys() == plain.keys() == expected.keys()
        for name, whole in expected.items():
            noise = relative(plain[name], whole)
            assert relative(found[name], whole) < 1.5 * noise + 0.02, name


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
