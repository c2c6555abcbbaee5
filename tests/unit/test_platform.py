"""The CPU platform changes where things run, never what is computed."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.inference.server_args import ServerOptions
from megavlm.parallel import platform, torchvision_ops


def test_install_is_idempotent() -> None:
    before = torch.empty, torch.Tensor.cuda, torch.cuda.current_device
    platform.install()
    assert (torch.empty, torch.Tensor.cuda, torch.cuda.current_device) == before


@pytest.mark.skipif(platform.has_gpu(), reason="says what a machine without a GPU does")
def test_allocations_for_cuda_land_on_the_cpu() -> None:
    assert torch.cuda.current_device() == "cpu"
    for tensor in (
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device="cuda"),
        torch.empty_like(torch.ones(2), device="cuda"),
        torch.ones(2).cuda(),
    ):
        assert tensor.device.type == "cpu"
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).type(torch.float64).dtype == torch.float64


def test_megatron_core_compiles_nothing_and_does_not_load_the_compiler() -> None:
    from megatron.core.jit import jit_fuser

    def function() -> None:
        pass

    assert jit_fuser(function) is function
    assert torch.compile.__module__ == "torch"


def test_device_contexts_still_work() -> None:
    """transformers builds models on the meta device; its rotary tables were garbage when this
    broke.
    """
    with torch.device("meta"):
        assert torch.empty(2).is_meta and torch.zeros(2).is_meta and torch.tensor([1.0]).is_meta


@pytest.mark.slow
def test_installing_after_megatron_is_refused() -> None:
    """Its functions would go on with the factories that they saw."""
    code = (
        "import sys; sys.modules['megatron.core'] = sys;"
        "from megavlm.parallel import platform; platform.install()"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "before importing megatron" in result.stderr


@given(
    weight_decay=st.sampled_from([0.0, 0.1]),
    decoupled=st.booleans(),
    on_a_gpu=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_adam_equals_torch(weight_decay: float, decoupled: bool, on_a_gpu: bool, seed: int) -> None:
    """The kernel for CPUs, and the one for GPUs."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(5, generator=generator)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": weight_decay}
    optimizers = (
        platform.Adam([ours], adam_w_mode=decoupled, **settings),
        (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], **settings),
    )
    for _ in range(3):
        gradient = torch.randn(5, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            with mock.patch.object(platform, "has_gpu", lambda: on_a_gpu):
                optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert optimizers[0].param_groups[0]["step"] == 3
    assert set(optimizers[0].state[ours]) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("name", ["_C.so", "_C_stable.so"])
@pytest.mark.parametrize("loads", [True, False])
def test_operators_are_defined_where_torchvision_s_extension_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, loads: bool
) -> None:
    """By the name that torchvision gives it from 0.29 on, too."""
    (tmp_path / "torchvision").mkdir()
    for file in ("__init__.py", "image.so", name):
        (tmp_path / "torchvision" / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    tried = list[str]()

    def load_library(path: Path) -> None:
        tried.append(path.name)
        if not loads:
            raise OSError("undefined symbol")

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    assert torchvision_ops._extension_loads() is loads
    assert tried == [name]


def test_ranks_and_servers_agree_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """One NCCL group over both hangs or fails if these differ; 0 is what SGLang sets."""
    names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    platform.start(0)
    servers = ServerOptions(Path("model"), dtype="bfloat16", device="cuda").environment()
    assert [os.environ[name] for name in names] == [servers[name] for name in names] == ["0", "0"]
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    platform.start(0)
    assert os.environ["NCCL_NVLS_ENABLE"] == "1", "the user's own value stays"
