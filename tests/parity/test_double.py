"""Qwen3.5 against transformers in fp64, where rounding hides nothing: every cast to fp32, in
transformers and here, is one to fp64.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.parity import cases, table
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import Reference, Sequences
from tests.parity.table import Case
from tests.support.fork import launch

pytestmark = pytest.mark.parity
TOLERANCE = 1e-9


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("qwen3_5", "one rank", "branches"), marks=pytest.mark.slow),
        pytest.param(Case("qwen3_5", "TP2+SP", "one image"), marks=pytest.mark.slow),
        pytest.param(Case("qwen3_5", "CP2", "branches"), marks=pytest.mark.slow),
        pytest.param(Case("qwen3_5_moe", "EP2 over TP2+SP", "branches"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_transformers_to_nine_digits(case: Case) -> None:
    inputs = inputs_of(model_folder(case.family))
    arguments = (inputs.folder, inputs.config, case, inputs.sequences(case.inputs)[:2])
    for result in launch(case.ranks.world_size, compare, *arguments):
        assert result.logits < TOLERANCE
        assert result.gradients < TOLERANCE, result.parameter


def compare(folder: Path, config: Any, case: Case, sequences: list[Sequences]) -> cases.Differences:
    """On each rank, in a process of its own, which stays in fp64."""
    reference, tensors = Reference(folder), load_file(folder / "model.safetensors")
    cases.HFFolder = lambda _: tensors  # type: ignore[misc,assignment]  # read before fp32 is gone
    cases.gradient_norm = lambda _: 0.0  # of megatron-core's optimizer, which insists on fp32
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.float32 = torch.float = torch.float64
    torch.set_default_dtype(torch.float64)
    reference.model.double()
    reference.model.set_experts_implementation("eager")  # the grouped product has no fp64
    reference.value_weight, reference.value_bias = (
        x.detach().double().requires_grad_() for x in (reference.value_weight, reference.value_bias)
    )
    _exact_frequencies(reference.model, config.text_config.rope_parameters["rope_theta"])
    with torch.no_grad():
        scores = [[reference.scores(x.prompt, r).logits for r in x.responses] for x in sequences]
    gradients = reference.gradients(sequences)
    expected = {
        "logits": [[x.numpy() for x in row] for row in scores],
        "gradients": {name: x.numpy() for name, x in gradients.items()},
        "value_head": {"weight": None, "bias": None},
    }
    table.OPTIONS["fp64"] = replace(table.OPTIONS[""], dtype=torch.float64)
    return cases.compare(folder, config, replace(case, options="fp64"), sequences, expected)


def _exact_frequencies(model: nn.Module, theta: float) -> None:
    """Compute rotary frequencies again, which were rounded to fp32."""
    for name, module in model.named_modules():
        if hasattr(module, "inv_freq"):
            size = 2 * len(module.inv_freq)
            base = 10000.0 if "visual" in name else theta
            module.inv_freq = base ** (-torch.arange(0, size, 2) / size)
