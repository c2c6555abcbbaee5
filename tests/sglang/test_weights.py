"""Weights pushed by two trainer ranks into a real server."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megavlm.families import family
from megavlm.inference.errors import WeightSyncError
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.model_config import model_config
from megavlm.models.common.loading import MEMORY, written_shapes
from megavlm.weight_sync.checksums import Checksums, check_checksums, tensor_hash
from megavlm.weight_sync.server_api import Servers, control_client
from megavlm.weight_sync.sglang_layout import ServerLayout, parameter_name
from tests.parity.reference import Reference
from tests.sglang.conftest import Served
from tests.sglang.pushes import (
    Trainer,
    changed,
    push,
    trainer_logprobs,
    with_tensors,
)
from tests.sglang.questions import largest_difference, prompts
from tests.support.families import entries_of
from tests.support.fork import launch
from tests.support.forked_servers import forked
from tests.support.generation import generate
from tests.support.merged import merged

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]


def differences(
    served: Served, reference: Reference, version: int | str, seed: int
) -> dict[str, float]:
    """Largest difference of log-probs over the kinds of prompts, by temperature."""
    by_name = prompts(served.processor, seed)
    suppressed = tuple(served.processor.suppressed_ids)
    largest = {}
    for temperature in (1.0, 0.7):
        drawn = SamplingParams(temperature, 8, suppressed_ids=suppressed, cache_key=str(version))
        groups = generate(
            served.client,
            list(by_name.values()),
            n=2,
            sampling_params=drawn,
            weight_version=version,
        )
        pairs = zip(by_name.items(), groups, strict=True)
        for (name, prompt), responses in pairs:
            difference = largest_difference(reference, prompt, responses, drawn)
            largest[f"{name} at {temperature}"] = difference
    return largest


def after_push(served: Served, kind: str, version: int, folder: Path) -> dict[str, float]:
    """Push other weights, the tower's too, from two ranks. Returns the differences from them."""
    weights = changed(served.folder, folder / kind, tower=True, seed=13 + version)
    trainer = Trainer(weights, freeze_tower=False)
    launch(2, push, [served.receiver], kind, trainer, folder / "scratch", version)
    return differences(served, Reference(weights), version, seed=0)


@pytest.mark.parametrize(
    ("family", "kind", "layout"),
    [
        ("qwen2_5_vl", "tensor", "TP2"),
        ("qwen2_5_vl", "disk", "TP2"),
        ("qwen2_5_vl", "distributed", "TP2"),
        pytest.param("qwen3_vl", "tensor", "TP2", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "tensor", "TP2", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "distributed", "EP2", marks=pytest.mark.slow),
        pytest.param("glm4v_moe", "distributed", "EP2", marks=pytest.mark.slow),
        pytest.param("internvl", "tensor", "TP2", marks=pytest.mark.slow),
        pytest.param("internvl_moe", "distributed", "EP2", marks=pytest.mark.slow),
        pytest.param("minicpmv4_6", "tensor", "TP2", marks=pytest.mark.slow),
        pytest.param("qwen3_omni_moe", "distributed", "EP2", marks=pytest.mark.slow),
    ],
)
def test_push(
    servers: Callable[[str], Served], family: str, kind: str, layout: str, tmp_path: Path
) -> None:
    """Only what is trained travels, and the server then computes what transformers does with it."""
    served = servers(family).restore()
    weights = changed(served.folder, tmp_path / "weights", tower=False, seed=11)
    # Images and prefixes with the old weights are in the server's caches by now.
    differences(served, Reference(served.folder), "start", seed=0)
    scratch, trainer = tmp_path / "scratch", Trainer(weights, layout)
    report, other = launch(2, push, [served.receiver], kind, trainer, scratch, 7)
    assert report == other

    entries = [
        entry
        for entry in entries_of(model_config(weights))
        if not entry.megatron.startswith("visual")
    ]
    frozen = {parameter_name(name) for entry in entries if entry.frozen for name in entry.hf}
    sizes = {
        name: shape
        for entry in entries
        if not entry.frozen
        for name, shape in written_shapes(entry, MEMORY).items()
    }
    assert report.tensors == len(sizes)
    assert report.bytes == 4 * sum(map(prod, sizes.values()))
    assert report.checked == len(served_names(served) - frozen)
    assert stale_norms(served, load_file(weights / "model.safetensors")) == []
    assert not scratch.exists() or not list(scratch.iterdir())

    assert served.get("/model_info")["weight_version"] == "7"
    after = differences(served, Reference(weights), 7, seed=0)
    assert max(after.values()) < 1e-4, after


@pytest.mark.parametrize(
    ("family", "layout", "targets"),
    [
        ("qwen2_5_vl", "TP2", ("language.attention", "language.mlp")),
        pytest.param("qwen3_vl", "PP2", ("language.attention",), marks=pytest.mark.slow),
    ],
)
def test_adapters_are_pushed_merged(
    servers: Callable[[str], Served],
    family: str,
    layout: str,
    targets: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """The server then computes what transformers does with merged weights, and what the trainer's
    ranks do with adapters beside them.
    """
    served = servers(family).restore()
    trainer = Trainer(served.folder, layout, targets=targets)
    report, _ = launch(2, push, [served.receiver], "tensor", trainer, tmp_path, 8)
    tensors, adapted = merged(served.folder, targets)
    assert report.tensors == len(adapted)
    folder = with_tensors(served.folder, tmp_path / "merged", tensors)
    after = differences(served, Reference(folder), 8, seed=0)
    assert max(after.values()) < 1e-4, after
    assert trainer_difference(served, trainer, 8) < 1e-4


def trainer_difference(served: Served, trainer: Trainer, version: int) -> float:
    """Between the server's log-probs and those of the trainer's ranks."""
    questions = list(prompts(served.processor).values())
    drawn = SamplingParams(0.8, 8, suppressed_ids=tuple(served.processor.suppressed_ids))
    groups = generate(served.client, questions, n=2, sampling_params=drawn, weight_version=version)
    arguments = (trainer, questions, groups, drawn)
    *_, last = launch(trainer.ranks.world_size, trainer_logprobs, *arguments)
    theirs = [[p for response in group for p in response.logprobs] for group in groups]
    return max(float(abs(a - b).max()) for a, b in zip(last, map(np.array, theirs), strict=True))


def served_names(served: Served) -> set[str]:
    """The engine's language tensors that are weights."""
    answer = served.post("/weights_checker", {"action": "checksum"})
    names = answer["ranks"][0]["checksums"]
    # SGLang's second names of a convolution's and decays' weights, and norms' weights plus one.
    twice = ("linear_attn.attn.", "gemma_weight")
    towers = ("visual", "vision_model", "mlp1", "vpm", "resampler", "audio_tower")
    left_out = (*towers, "rotary", *twice)
    return {name for name in names if not any(part in name for part in left_out)}


def stale_norms(served: Served, tensors: dict[str, torch.Tensor]) -> list[str]:
    """The engine's copies of norms' weights plus one that are not of these tensors. Only kernels of
    a GPU read them.
    """
    sums = served.post("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
    names = family(json.loads((served.folder / "config.json").read_text())["model_type"])
    without_attention = ServerLayout(linear_rows=(1, 1), names=names.server_names())
    expected = {
        parameter_name(name, without_attention).replace(".weight", ".gemma_weight"): x + 1
        for name, x in tensors.items()
    }
    return [
        name
        for name, found in sums.items()
        if name.endswith(".gemma_weight") and found != tensor_hash(expected[name], "cpu")
    ]


def checksums(
    tensors: list[tuple[str, torch.Tensor]], engine: ServerLayout
) -> list[dict[str, str]]:
    """What each rank of a server on a CPU must report of these tensors."""
    sums = Checksums()
    sums.add(tensors, {engine: "cpu"})
    return sums.result()[engine]


def test_checksums_name_the_tensor_that_differs(served: Served) -> None:
    tensors = list(load_file(served.folder / "model.safetensors").items())
    broken = [(name, t + 1 if name.endswith("0.mlp.up_proj.weight") else t) for name, t in tensors]
    engine, url = ServerLayout(num_kv_heads=2), served.server.url
    with control_client() as http:
        servers = Servers([served.receiver], http=http)
        expected = checksums(tensors, engine)
        assert check_checksums(servers, {url: expected}) == len(expected[0]) > 40
        expected = checksums(broken, engine)
        with pytest.raises(WeightSyncError, match=r"layers\.0\.mlp\.gate_up_proj\.weight"):
            check_checksums(servers, {url: expected})


def test_a_session_that_a_dead_trainer_left_open_is_no_failure(
    served: Served, tmp_path: Path
) -> None:
    weights = changed(served.folder, tmp_path / "weights", tower=False, seed=12)
    served.post("/begin_weight_update", {})
    launch(2, push, [served.receiver], "tensor", Trainer(weights), tmp_path, 8)
    assert max(differences(served, Reference(weights), 8, seed=0).values()) < 1e-4
    served.post("/end_weight_update", {})


def test_kept_images_go_stale(served: Served, tmp_path: Path) -> None:
    """Why `cache_images` is there: SGLang keeps a seen image's features over any update."""
    differences(served, Reference(served.folder), "start", seed=100)
    weights = changed(served.folder, tmp_path / "weights", tower=True, seed=15)
    trainer = Trainer(weights, freeze_tower=False)
    launch(2, push, [served.receiver], "tensor", trainer, tmp_path, 9)
    after = differences(served, Reference(weights), 9, seed=100)
    assert after.pop("text at 1.0") < 1e-4 and after.pop("text at 0.7") < 1e-4
    assert min(after.values()) > 1e-3, after


@pytest.mark.slow
def test_trained_tower_and_two_server_ranks(folder: Path, started: Served, tmp_path: Path) -> None:
    """With `cache_images=False` an image seen before is right after the tower changed."""
    options = ServerOptions(
        folder, dtype="float32", device="cpu", tensor_parallel=2, cache_images=False
    )
    with forked(ManagedServer(options, log_path=tmp_path / "server.log")) as server:
        served = Served(folder, started.processor, server, tensor_parallel=2)
        before = differences(served, Reference(folder), "default", seed=0)
        assert max(before.values()) < 1e-4, before
        for version, kind in enumerate(("tensor", "distributed")):
            after = after_push(served, kind, version, tmp_path)
            assert max(after.values()) < 1e-4, after


def test_noise_matters(folder: Path, tmp_path: Path) -> None:
    """The weights that these tests push are far from the old ones: a stale server would show."""
    weights = changed(folder, tmp_path / "weights", tower=False, seed=11)
    ids = torch.arange(1, 9)[None]
    old, new = (Reference(path).model(input_ids=ids).logits for path in (folder, weights))
    assert (old.log_softmax(-1) - new.log_softmax(-1)).abs().max() > 0.1
