"""A server with weights in block FP8, which gets them from trainer ranks that quantise their own
shards: it then has exactly what SGLang's loader makes of files that SGLang's quantiser made.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megavlm import sglang_cpu
from megavlm.data.processor import Processor
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import FP8_ARGS, ServerOptions
from megavlm.sglang_cpu.dequantisation import dequantised
from megavlm.weight_sync.block_fp8 import SUFFIX
from megavlm.weight_sync.sglang_layout import hub_tensors, piece_name
from tests.conftest import DATA
from tests.parity.reference import Reference
from tests.sglang.conftest import Served
from tests.sglang.pushes import Trainer, changed, push, with_tensors
from tests.sglang.questions import QUESTION
from tests.sglang.test_weights import differences
from tests.support.cache import cached_folder
from tests.support.fork import launch
from tests.support.forked_servers import forked
from tests.support.sglang_fp8 import quantised_files

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]


def model_folder(family: str) -> Path:
    """A model whose linear layers are whole blocks on each of two ranks."""
    sizes: dict[str, Any] = {
        "seed": 3,
        "family": family,
        "hidden_size": 256,
        "ffn_size": 512,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vision_ffn_size": 256,  # on a CPU, SGLang pads a quantised model's to 128 for each rank
        "num_layers": 4 if family.startswith("qwen3_5") else 2,
        "init_std": 0.05,
        "randomise_norms_and_biases": True,
        "max_vocab": 300,
    }
    sizes |= {"head_dim": 128} if family.startswith("qwen3") else {"hidden_size": 512}
    if family.startswith("qwen3_5"):
        sizes["linear_head_dim"] = 128
    if "moe" in family:
        sizes["moe_ffn_size"] = 512
    texts = [QUESTION] * 10
    return cached_folder(
        "served in fp8", (texts, sizes), lambda folder: make_tiny_model(folder, texts, **sizes)
    )


def quantised(folder: Path, family: str, to: Path) -> Path:
    """The folder in block FP8, by SGLang's quantiser, with experts one by one."""
    tensors = []
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".experts." in name:
            rows = tensor.transpose(1, 2) if family.startswith("qwen3_5") else tensor
            tensors.append((piece_name(name, range(len(rows)), len(rows)), rows))
        else:
            tensors.append((name, tensor))
    return with_tensors(folder, to, quantised_files(dict(hub_tensors(tensors))))


def rounded(folder: Path, to: Path) -> Path:
    """The folder with the weights that its quantised ones stand for."""
    tensors = load_file(folder / "model.safetensors")
    files = quantised_files(tensors)
    for name, tensor in tensors.items():
        if name + SUFFIX in files:
            tensors[name] = dequantised(files[name], files[name + SUFFIX], (128, 128))
            assert not torch.equal(tensors[name], tensor)
    return with_tensors(folder, to, tensors)


def sums(served: Served) -> list[dict[str, str]]:
    """The checksums of each rank's parameters, of quantised ones after SGLang has multiplied them
    with their scales. The numbers and scales themselves are compared in every push.
    """
    ranks = served.post("/weights_checker", {"action": "checksum"})["ranks"]
    return [rank["checksums"] for rank in ranks]


def load_files(served: Served, folder: Path) -> list[dict[str, str]]:
    """Load a folder with SGLang's own loader. Returns the checksums."""
    body = {"model_path": str(folder), "load_format": "safetensors"}
    served.post("/update_weights_from_disk", body)
    return sums(served)


@pytest.mark.slow
def test_a_quantised_server_does_not_scale_its_cache() -> None:
    """Whatever a start without weights, or released memory, leaves in the scales."""
    program = """
import megavlm_weights
import torch
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

megavlm_weights.install()
layer, method = torch.nn.Module(), BaseKVCacheMethod(None)
method.create_weights(layer)
layer.k_scale.data.fill_(3e-4)
method.process_weights_after_loading(layer)
print(layer.k_scale_float, layer.v_scale_float, layer.k_scale.item())
"""
    folders = [sglang_cpu.FOLDER, sglang_cpu.FOLDER.parent / "inference" / "server_support"]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1.0 1.0 1.0\n", done.stderr


@pytest.mark.parametrize(
    ("family", "kind", "layout", "ranks"),
    [
        pytest.param("qwen2_5_vl", "tensor", "TP2", 1, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "distributed", "TP2", 2, marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", "tensor", "EP2", 1, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "tensor", "EP2", 2, marks=pytest.mark.slow),
    ],
)
def test_pushed_weights_are_those_of_sglangs_loader(
    family: str, kind: str, layout: str, ranks: int, tmp_path: Path
) -> None:
    folder = model_folder(family)
    options = ServerOptions(
        folder, dtype="bfloat16", device="cpu", tensor_parallel=ranks, server_args=FP8_ARGS
    )
    with forked(ManagedServer(options, log_path=tmp_path / "server.log")) as server:
        served = Served(folder, Processor(folder, DATA, family_of(folder)), server, ranks)
        receiver = replace(served.receiver, needs_all=True)  # it has started without weights
        trainer = Trainer(folder, layout, fp8=True, delta=ranks == 2)
        launch(2, push, [receiver], kind, trainer, tmp_path / "scratch", 3)
        pushed = sums(served)
        if family == "qwen2_5_vl":
            reference = Reference(rounded(folder, tmp_path / "rounded"))
            after = differences(served, reference, 3, seed=0)
            assert max(after.values()) < 0.2, after  # the server computes in bfloat16

        other = changed(folder, tmp_path / "other", tower=True, seed=5)
        others = load_files(served, quantised(other, family, tmp_path / "other files"))
        assert all(mine != theirs for mine, theirs in zip(pushed, others, strict=True))
        assert load_files(served, quantised(folder, family, tmp_path / "files")) == pushed
