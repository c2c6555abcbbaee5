"""GPUs, ports and launch options of a run's servers."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.load import load
from megavlm.inference.connect import connect, managed_servers, server_gpus, server_handles
from megavlm.inference.server_args import ServerOptions
from megavlm.observability.progress import Progress
from megavlm.slurm.server_plan import server_plan


@pytest.mark.parametrize(
    ("sections", "cached"),
    [
        ({}, True),
        ({"model": {"freeze_tower": False}}, False),
        ({"model": {"freeze_merger": False}}, False),
        ({"lora": {"rank": 2}}, True),
        ({"lora": {"rank": 2, "targets": ["language.mlp", "vision.merger"]}}, False),
        ({"lora": {"rank": 2, "targets": ["visual.blocks.0.attn.qkv"]}}, False),
        ({"lora": {"targets": ["vision.mlp"]}}, True),  # without a rank there are no adapters
    ],
)
def test_features_of_images_are_kept_while_the_tower_does_not_change(
    write_recipe: Any, sections: dict[str, Any], cached: bool
) -> None:
    """SGLang never drops them when weights change."""
    (server,) = managed_servers(load(write_recipe(**sections)), "model")
    assert ("SGLANG_VLM_CACHE_SIZE_MB" not in server._environment) == cached


def test_ports_logs_and_cores_differ(write_recipe: Any, tmp_path: Path) -> None:
    rollout = {"servers": 3, "port": 31000, "tensor_parallel": 2}
    servers = managed_servers(load(write_recipe(rollout=rollout)), "model")
    assert [server.port for server in servers] == [31000, 31001, 31002]
    assert len({server.log_path for server in servers}) == 3
    assert len({server.api_key for server in servers}) == 3
    bound = [server._environment["SGLANG_CPU_OMP_THREADS_BIND"] for server in servers]
    assert all(len(cores.split("|")) == 2 for cores in bound)
    (alone,) = managed_servers(load(write_recipe()), "model")
    assert alone.log_path.name == "rollout_server.log"


@pytest.mark.parametrize("needs_refit", [True, False])
def test_only_servers_that_get_weights_start_without_them(
    write_recipe: Any, monkeypatch: pytest.MonkeyPatch, needs_refit: bool
) -> None:
    """Quantised ones; a server of an evaluation would answer with random weights."""

    class Made(Exception):
        pass

    def make(options: ServerOptions, **_: Any) -> None:
        raise Made(options.server_args)

    monkeypatch.setattr("megavlm.inference.connect.ManagedServer", make)
    config = load(write_recipe(rollout={"quantization": "fp8"}, model={"dtype": "bfloat16"}))
    progress = Progress(is_quiet=True)
    with pytest.raises(Made) as made, connect(config, "m", progress, needs_refit=needs_refit):
        pass
    (arguments,) = made.value.args
    quantised = {"load_format", "json_model_override_args"}
    assert arguments.keys() & quantised == (quantised if needs_refit else set())


@pytest.mark.parametrize("colocate", [False, True])
def test_servers_on_shared_gpus_are_waited_for(
    write_recipe: Any, monkeypatch: pytest.MonkeyPatch, colocate: bool
) -> None:
    class Made(Exception):
        pass

    def make(*_: Any, waits: bool, joining: Any) -> None:
        raise Made(waits)

    monkeypatch.setattr("megavlm.inference.connect.ServerPool", make)
    config = load(write_recipe(rollout={"colocate": colocate}))
    with pytest.raises(Made) as made, connect(config, "m", Progress(is_quiet=True), waits=False):
        pass
    assert made.value.args == (colocate,)


@pytest.mark.parametrize(
    ("keys", "trainers", "first"),
    [
        ({"tensor_parallel": 4}, 4, [4]),
        ({"servers": 2, "tensor_parallel": 2}, 4, [4, 6]),
        ({"servers": 2, "tensor_parallel": 2, "colocate": True}, 4, [0, 2]),
        ({"servers": 2, "gpus": [7, 5]}, 4, [7, 5]),
        ({"tensor_parallel": 2, "gpus": [6, 7]}, 4, [6]),
        ({"servers": 8, "colocate": True}, 8, list(range(8))),
    ],
)
def test_gpus(write_recipe: Any, keys: dict[str, Any], trainers: int, first: list[int]) -> None:
    rollout = load(write_recipe(rollout=keys)).rollout
    assert list(server_gpus(rollout, 8, trainers)) == first
    if not rollout.gpus:
        assert list(server_gpus(rollout, 0, trainers)) == [0] * rollout.servers


@pytest.mark.parametrize(
    ("keys", "num_gpus", "trainers", "sentence"),
    [
        (
            {"tensor_parallel": 4},
            8,
            5,
            r"would take GPUs \[5, 6, 7, 8\], but this machine has 8 and trains on 5",
        ),
        ({"tensor_parallel": 16}, 8, 8, "16 is more than the 8 GPUs of this machine, on which"),
        ({"tensor_parallel": 16, "colocate": True}, 8, 8, "managed stays: lower it"),
        ({"gpus": [8]}, 8, 4, r"would take GPUs \[8\]"),
        ({"gpus": [0]}, 0, 2, r"would take GPUs \[0\], but this machine has 0 and"),
        ({"gpus": [3]}, 8, 4, r"rollout\.gpus=\[3\] names GPUs of the 4 trainer ranks"),
    ],
)
def test_gpus_that_are_not_there_or_taken(
    write_recipe: Any, keys: dict[str, Any], num_gpus: int, trainers: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        server_gpus(load(write_recipe(rollout=keys)).rollout, num_gpus, trainers)


def server_args(recipe: Path, device: str) -> Mapping[str, Any]:
    return ServerOptions.from_config(load(recipe), "model", device).server_args


@pytest.mark.parametrize("needs_refit", [True, False])
@pytest.mark.parametrize("freeze", [True, False])
def test_what_external_servers_must_be(write_recipe: Any, freeze: bool, needs_refit: bool) -> None:
    rollout = {"mode": "external", "urls": ["http://a:1", "http://b:1/"]}
    config = load(write_recipe(rollout=rollout, model={"freeze_tower": freeze}))
    one, other = server_handles(config, "model", needs_refit=needs_refit)
    assert one.required == other.required and other.url == "http://b:1"
    assert one.required.fresh_images == (needs_refit and not freeze)


def test_servers_on_shared_gpus_can_release_all_memory(write_recipe: Any) -> None:
    """Weights without a copy on the host, and graphs."""
    recipe = write_recipe(rollout={"colocate": True})
    assert server_args(recipe, "cpu") == {}
    shared = {"enable_memory_saver": True, "disable_prefill_cuda_graph": True}
    assert server_args(recipe, "cuda").items() >= shared.items()
    assert "enable_weights_cpu_backup" not in server_args(recipe, "cuda")
    options = ServerOptions.from_config(load(recipe), "model", "cuda")
    assert options.variables()["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    alone = ServerOptions.from_config(load(write_recipe()), "model", "cuda")
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in alone.variables()
    assert not server_args(write_recipe(), "cuda").keys() & shared.keys()


@pytest.mark.parametrize(
    ("rollout", "requests"),
    [
        ({}, 64 * 8),
        ({"servers": 3}, 43 * 8),
        ({"servers": 3, "max_staleness": 1, "oversample": 1.5}, 64 * 8),  # its concurrency
        ({"servers": 6, "max_staleness": 1}, 43 * 8),  # prompts of two steps
        ({"servers": 6, "max_staleness": 2, "oversample": 1.5}, 32 * 8),
        ({"concurrency": 256}, 1024),  # never more
        ({"mode": "external", "urls": ["http://a:1", "http://b:1", "http://c:1"]}, 43 * 8),
        ({"server_args": {"cuda_graph_max_bs_decode": 16}}, 16),
    ],
)
def test_all_requests_of_a_server_decode_in_cuda_graphs(
    write_recipe: Any, rollout: dict[str, Any], requests: int
) -> None:
    algorithm = {"prompts_per_step": 128, "responses_per_prompt": 8, "minibatches": 1}
    recipe = write_recipe(rollout=rollout, algorithm=algorithm)
    assert "cuda_graph_max_bs_decode" not in server_args(recipe, "cpu") or requests == 16
    assert server_args(recipe, "cuda").get("cuda_graph_max_bs_decode") == requests


def test_launch_script_arguments(write_recipe: Any) -> None:
    """Managed servers have the same arguments; bash must not change them."""
    sections: dict[str, Any] = {
        "model": {"folder": "models/a b", "dtype": "bfloat16", "freeze_tower": False},
        "rollout": {"mode": "external", "urls": ["http://a:1"], "tensor_parallel": 4},
    }
    script = server_plan(load(write_recipe(**sections))) + (
        '\nprintf "%s\\n" "$tensor_parallel" "${server_environment[@]}" "${server_arguments[@]}"'
    )
    bash = str(shutil.which("bash"))
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=True)
    size, *words = done.stdout.splitlines()
    assert size == "4"
    variables, words = words[:5], words[5:]
    assert variables[-2:] == ["SGLANG_VLM_CACHE_SIZE_MB=0", "SGLANG_EXPOSE_OWN_ENV_VARS=1"]
    assert "PYTHONFAULTHANDLER=1" in variables, "the stacks of aborted servers"
    assert words[:2] == ["--model-path", "models/a b"]
    assert " ".join(words[2:]) == (
        "--device cuda --dtype bfloat16 --tp-size 4 --log-level warning "
        "--mem-fraction-static 0.85 --prefill-decode-interval 0 --mm-feature-transport cpu "
        "--cuda-graph-max-bs-decode 128"
    )


def test_a_launch_script_returns_the_experts_that_are_replayed(write_recipe: Any) -> None:
    sections = {"rollout": {"mode": "external", "urls": ["http://a:1"]}}
    flag = "--enable-return-routed-experts"
    assert flag not in server_plan(load(write_recipe(**sections)))
    recipe = write_recipe(**sections, algorithm={"name": "grpo", "routing_replay": True})
    assert flag in server_plan(load(recipe))


def test_a_launch_script_serves_adapters(write_recipe: Any) -> None:
    rollout = {"mode": "external", "urls": ["http://a:1"], "lora": "adapter"}
    plan = server_plan(load(write_recipe(rollout=rollout, lora={"rank": 8})))
    assert (
        "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj k_proj v_proj o_proj" in plan
    )
    assert "SGLANG_VLM_CACHE_SIZE_MB=512" in plan and "torch_native" not in plan
