"""Cases of the parity matrix on the GPU path; `test_stage.py` and `make test-gpu-path` run them."""

from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megavlm.models.common.config import ModelOptions
from tests.distributed.test_lora_training import gradients as adapter_gradients
from tests.parity.cases import packs_of
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import distinct_images
from tests.parity.runs import Run
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, OPTIONS, Case
from tests.parity.test_parity import check
from tests.support.fork import launch
from tests.support.lora_runs import EXPERTS, lora_folder

OPTIONS["no fusions"] = replace(OPTIONS[""], fusions=False)
CASES = [
    Case("qwen2_5_vl", "TP2+SP"),
    Case("qwen2_5_vl", "TP2+SP", "branches", "recompute full"),
    Case("qwen2_5_vl", "TP2+SP", "mixed", "separate critic"),
    Case("qwen2_5_vl", "TP2+SP", "mixed", "no fusions"),
    Case("qwen2_vl", "PP2 virtual 2"),
    Case("qwen3_vl", "TP2+SP", "branches", "recompute selective"),
    Case("qwen3_vl", "CP2"),
    Case("qwen3_vl_moe", "one rank"),
    Case("qwen3_vl_moe", "EP2"),
    Case("qwen3_vl_moe", "EP2 over TP2+SP", "mixed", "recompute full"),
    Case("qwen3_vl_moe", "EP2 over TP2+SP", "mixed", "no fusions"),
    Case("qwen3_5", "TP2+SP", "branches"),
    Case("qwen3_5_moe", "EP2", "mixed", "recompute full"),
    Case("glm4v", "TP2+SP", "branches"),
    Case("glm4v_moe", "EP2 over TP2+SP", "mixed", "recompute full"),
    Case("internvl", "TP2+SP"),
    Case("minicpmv4_6", "TP2+SP", "branches"),
    Case("qwen3_omni_moe", "EP2 over TP2+SP", "audio", "recompute full"),
]
# Of `model.fusions`: the function that is called where it is on.
FUSED = {
    "rotary embedding": ("transformer_engine_torch", "fused_rope_forward"),
    "SwiGLU": ("megatron.core.transformer.mlp", "bias_swiglu_impl"),
    "SwiGLU of experts": ("megatron.core.transformer.moe.experts", "weighted_bias_swiglu_impl"),
    "permutation": ("megatron.core.transformer.moe.moe_utils", "fused_permute_with_probs"),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_transformers(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("modules", [("moe_act",), ("moe", "core_attn")])
def test_experts_with_adapters_are_computed_again(modules: tuple[str, ...]) -> None:
    """`moe_act` frees the input of the second linear layer, which its adapters need too."""
    folder, ranks = lora_folder("qwen3_vl_moe"), EXPERT_LAYOUTS["EP2"]
    again = {"recompute": "selective", "recompute_modules": modules}
    kept = launch(2, adapter_gradients, folder, ranks, EXPERTS, 0.0, {})
    found = launch(2, adapter_gradients, folder, ranks, EXPERTS, 0.0, again)
    for expected, gradients in zip(kept, found, strict=True):
        for name, gradient in expected.items():
            np.testing.assert_array_equal(gradients[name], gradient, err_msg=name)


@pytest.mark.parametrize("fusions", [True, False])
def test_each_fusion_is_on_where_it_is_asked_for(fusions: bool) -> None:
    inputs = inputs_of(model_folder("qwen3_vl_moe"))
    (found,) = launch(1, fused, inputs.folder, inputs.config, fusions)
    assert found == dict.fromkeys([*FUSED, "weight gradients"], fusions)


def fused(folder: Path, config: Any, fusions: bool) -> dict[str, bool]:
    """Return which fusions a forward and backward pass used."""
    cases = inputs_of(folder).sequences("one image")
    ranks, images = LAYOUTS["one rank"], distinct_images(cases)
    with ExitStack() as stack:
        spies = {}
        for name, (module, function) in FUSED.items():
            owner = import_module(module)
            spy = mock.patch.object(owner, function, wraps=getattr(owner, function))
            spies[name] = stack.enter_context(spy)
        run = Run.start(folder, config, ranks, ModelOptions(fusions=fusions), images)
        run.backward(packs_of([cases], config, ranks))
        linear = run.chunks[0].language_model.decoder.layers[0].self_attention.linear_proj
    found = {name: spy.called for name, spy in spies.items()}
    return found | {"weight gradients": linear.weight.grad_added_to_main_grad}
