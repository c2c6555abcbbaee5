"""CPU support in a server's process: its changes, and that there are no others."""

import json
import os
import subprocess
import sys

import pytest

from megavlm import sglang_cpu
from megavlm.families import FAMILIES
from tests.support.timeouts import scaled


def run(program: str, **variables: str) -> str:
    """Output of a program in a process with the support on its path and megavlm not importable."""
    result = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=os.environ | {"PYTHONPATH": str(sglang_cpu.FOLDER)} | variables,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_start_up_imports_nothing_heavy() -> None:
    assert (
        run("import sys; print('torch' in sys.modules, 'sgl_kernel' in sys.modules)")
        == "False False\n"
    )


def test_workers_are_forked() -> None:
    program = """
import multiprocessing
for method in ("spawn", "forkserver"):
    multiprocessing.set_start_method(method, force=True)
    print(multiprocessing.get_start_method())
"""
    assert run(program) == "fork\nforkserver\n"


@pytest.mark.slow
def test_torchvision_imports_and_keeps_its_operators() -> None:
    program = (
        "import gc, torchvision, torch; gc.collect();"
        "from torchvision.transforms.v2 import functional;"
        "print(hasattr(torch.ops.torchvision, 'nms'))"
    )
    assert run(program) == "True\n"


def test_models_are_looked_for_among_those_of_the_family() -> None:
    program = """
import importlib.util, pkgutil
(folder,) = importlib.util.find_spec("sglang").submodule_search_locations
for package in ("models", "multimodal.processors", "layers"):
    path = f"{folder}/srt/{package.replace('.', '/')}"
    names = [module.name for module in pkgutil.iter_modules([path], f"sglang.srt.{package}.")]
    print(len(names) > 0, all("qwen" in name for name in names))
"""
    served = {"MEGAVLM_SERVED_MODULES": FAMILIES["qwen2_5_vl"].served_modules}
    assert run(program, **served).splitlines() == ["True True", "True True", "True False"]
    assert run(program).splitlines() == ["True False"] * 3


@pytest.mark.slow
def test_sgl_kernel_imports_any_name_and_refuses_to_run() -> None:
    program = """
from sgl_kernel import rmsnorm
from sgl_kernel.mamba import causal_conv1d_fwd
import sgl_kernel, torch
for function in (rmsnorm, causal_conv1d_fwd):
    try:
        function(1, 2)
    except NotImplementedError as error:
        print(error)
print(hasattr(sgl_kernel, "__wrapped__"))
print(hasattr(torch.ops.sgl_kernel, "rmsnorm_cpu"))
print(hasattr(torch.ops.sgl_kernel, "convert_weight_packed"))
"""
    assert run(program).splitlines() == [
        "sgl_kernel.rmsnorm needs a GPU; this is the CPU stand-in",
        "sgl_kernel.mamba.causal_conv1d_fwd needs a GPU; this is the CPU stand-in",
        "False",
        "True",
        "False",
    ]


@pytest.mark.slow
@pytest.mark.sglang
def test_merged_requests_with_an_adapter_on_experts_may_have_many_tokens() -> None:
    program = """
import torch
from sglang.srt.lora.backend import base_backend
ends, ranks, merged = torch.tensor([0, 268]), torch.tensor([0, 8]), torch.tensor([1])
_, slots = base_backend._compute_moe_lora_info(268, ends, ranks, merged, None, None, max_len=134)
print(slots.tolist() == [1] * 268)
"""
    assert run(program, SGLANG_USE_CPU_ENGINE="1") == "True\n"


def test_drafts_change_nothing_in_what_is_sampled() -> None:
    """Accepted or not, the tokens follow the target's distribution, and a draft is accepted with
    its probability under it.
    """
    program = """
import json, torch
from speculation import sample_chain
torch.manual_seed(0)
chains = 40_000
probs = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.8, 0.0], [0.1, 0.1, 0.8]])
predicts, indices = torch.zeros(3 * chains, dtype=torch.int32), torch.zeros(chains, 3).int()
counts = torch.zeros(chains, dtype=torch.int32)
sample_chain(
    target_probs=probs.expand(chains, 3, 3), predicts=predicts, accept_index=indices,
    accept_token_num=counts, candidates=torch.tensor([[7, 1, 0]]).expand(chains, 3),
)
share = lambda tokens: (torch.bincount(tokens, minlength=3) / len(tokens)).tolist()
tokens = predicts.view(chains, 3)
firsts, seconds = tokens[:, 0], tokens[counts >= 1][:, 1]
print(json.dumps([share(firsts), share(seconds), share(counts), indices[counts == 1][0].tolist()]))
"""
    first, second, counts, kept = json.loads(run(program))
    assert first == pytest.approx([0.6, 0.3, 0.1], abs=0.01)
    assert second == pytest.approx([0.2, 0.8, 0.0], abs=0.01)
    assert counts == pytest.approx([0.7, 0.3 * 0.8, 0.3 * 0.2], abs=0.01)
    assert kept[1] == kept[0] + 1 and kept[2] == -1
