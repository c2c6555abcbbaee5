"""The GPU tests' own code on a CPU: their bodies with tiny models, what they find, and the page."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.config.load import load
from megavlm.models.registry import family as family_of
from megavlm.parallel import platform
from megavlm.run.preflight import check_server_args
from tests.gpu import figures, grpo, linear_attention, plan, report, shapes
from tests.gpu.grpo import Memory
from tests.unit.models.releases import RELEASES

EXACT = {"logprobs": 0.01, "gradient": 1.001}


@pytest.mark.slow
@pytest.mark.xdist_group("sglang")
def test_the_bodies_of_the_gpu_tests_run_on_a_cpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu/test_gpu.py"]
    environment = os.environ | {shapes.SWITCH: "tiny", "PYTEST_ADDOPTS": ""}
    reply = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert reply.returncode == 0 and "6 passed" in reply.stdout, reply.stdout + reply.stderr


@pytest.mark.slow
@pytest.mark.skipif(platform.has_gpu(), reason="says what happens without a GPU")
def test_without_a_gpu_they_are_collected_and_skipped_with_a_reason() -> None:
    command = [sys.executable, "-m", "pytest", "-rs", "tests/gpu/test_gpu.py"]
    environment = {name: value for name, value in os.environ.items() if name != shapes.SWITCH}
    reply = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert reply.returncode == 0 and "6 skipped" in reply.stdout
    assert "needs a GPU: `make gpu` runs these" in reply.stdout


@pytest.mark.parametrize("family", shapes.RELEASED)
def test_shapes_are_the_released_ones(family: str) -> None:
    shape = shapes.update_shape()
    ours = shapes.model_config(family, shape)
    published = RELEASES[shapes.NAMES[family]]
    text = published.get("text_config", published)
    for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
                 "num_key_value_heads", "vocab_size"):  # fmt: skip
        assert getattr(ours.text_config, name) == text[name], name
    vision = published["vision_config"]
    for name in ("depth", "num_heads", "intermediate_size", "hidden_size"):
        assert getattr(ours.vision_config, name) == vision[name], name
    architecture = family_of(family).architecture(ours)
    assert architecture["kv_channels"] == 128


def test_parity_is_judged_by_transformers_own_error() -> None:
    found = {"transformers": EXACT, "flash": {"logprobs": 0.012, "gradient": 0.99}}
    assert plan.parity_faults(found) == []
    far = found | {"flex": {"logprobs": 0.02, "gradient": 1.1}}
    assert [fault.split(":")[0] for fault in plan.parity_faults(far)] == ["flex", "flex"]
    nan = found | {"flex": {"logprobs": float("nan"), "gradient": float("nan")}}
    assert len(plan.parity_faults(nan)) == 2


def test_a_kernel_is_judged_by_each_of_its_tensors() -> None:
    found = {
        "kernel": {"output": 0.004, "decay": 0.019},
        "rounding": {"output": 0.002, "decay": 0.002},
    }
    assert plan.kernel_faults(found) == []
    found["kernel"] = {"output": float("nan"), "decay": 0.3}
    assert [fault.split(":")[0] for fault in plan.kernel_faults(found)] == ["output", "decay"]


@pytest.mark.parametrize("lost", ["state", "gradient of the state"])
def test_a_kernel_that_loses_a_parents_state_is_found(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = linear_attention.choose_rule()

    def broken(*inputs: Any, initial_state: torch.Tensor | None, **settings: Any) -> Any:
        given = None if lost == "state" or initial_state is None else initial_state.detach()
        return rule(*inputs, initial_state=given, **settings)

    monkeypatch.setenv(shapes.SWITCH, "tiny")
    assert plan.kernel_faults(linear_attention.measure()) == []
    monkeypatch.setattr(linear_attention, "choose_rule", lambda: broken)
    assert len(plan.kernel_faults(linear_attention.measure())) >= 4


def steps(**values: Any) -> list[dict[str, Any]]:
    return [
        {"step": i, "sync_checked": 9, "skipped_updates": 0, "sync_bytes": 1e9, "sync_tensors": 9,
         "tokens_per_second": 100.0, "memory_gib": 3.0, "rollout_max_difference": 0.01,
         "seconds/update": 2.0, "seconds/total": 5.0, **values}
        for i in range(1, 11)
    ]  # fmt: skip


def memory(growth: float = 0.0, released: float = 30e9) -> Memory:
    """Samples of ten steps, of which each needs 60 GB at most."""
    return Memory(
        [
            (step - 1, int(used + growth * step))
            for step in range(1, 11)
            for used in (60e9, 60e9 - released)
        ]
    )


@pytest.mark.parametrize(
    ("run", "used", "fault"),
    [
        (steps(), memory(), None),
        (steps(sync_checked=0), memory(), "no checksum"),
        (steps(skipped_updates=1), memory(), "skipped"),
        (steps(), memory(growth=1e9), "memory grew by 6.0"),
        (steps(), memory(released=0), "nothing was released"),
    ],
)
def test_a_run_is_judged(run: list[dict[str, Any]], used: Memory, fault: str | None) -> None:
    found = plan.grpo_faults(run, used, int(80e9))
    assert (found == []) if fault is None else (fault in found[0])


def test_memory_is_sampled_beside_a_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with grpo.watched(path, lambda: 7, every=0.01) as sampled:
        while len(sampled.samples) < 2:
            pass
        path.write_text("{}\n")
        while sampled.samples[-1][0] < 1:
            pass
    assert sampled.by_step() == {1: (7, 7), 2: (7, 7)}


@pytest.mark.parametrize("is_tiny", [True, False])
def test_the_run_s_recipe_is_valid(tmp_path: Path, is_tiny: bool) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(str(grpo.recipe(tmp_path, is_tiny=is_tiny)).replace("True", "true").replace(
        "False", "false"
    ))  # fmt: skip
    config = load(path)
    assert config.rollout.colocate and config.rollout.sync == "tensor"
    assert config.algorithm.steps == (3 if is_tiny else 10)
    check_server_args(config.rollout)


def test_all_parts_together_take_nine_minutes_at_most() -> None:
    each = len(shapes.RELEASED)
    limits = plan.LIMITS
    total = each * (limits["parity"] + limits["figures"]) + limits["grpo"] + limits["run"]
    assert total + limits["linear_attention"] <= 9 * 60


def test_the_page_has_what_was_measured(tmp_path: Path) -> None:
    row = {"seconds": 1.5, "gigabytes": 20.0}
    phase = {"phase": "vision", **row, "tokens_per_second": 1234.5, "mfu": 0.4}
    tables = {
        "phases": [phase, phase | {"phase": "log-probs", "mfu": None}],
        "savings": [{"saving": "prompt shared", "on": row, "off": row | {"seconds": 3.0}}],
        "chunks": [{"chunk": 2048, "is_default": True, "targets": 8192, **row}],
    }
    results = {
        "parity": {"Qwen3-VL-2B": {"transformers": EXACT}},
        "figures": {"Qwen3-VL-2B": tables},
        "linear attention": {"kernel": {"output": 0.004}, "rounding": {"output": 0.002}},
        "grpo": {"model": "Qwen3-VL-2B", **grpo.summary(steps(), memory())},
    }
    plan.write(results, tmp_path / "GPU.md")
    text = (tmp_path / "GPU.md").read_text()
    for line in (
        "| Qwen3-VL-2B | transformers | 1.00e-02 | 1.0010 |",
        "| output | 4.0e-03 | 2.0e-03 |",
        "| vision | 1.500 s | 1,234 | 40.0% | 20.0 GB |",
        "| log-probs | 1.500 s | 1,234 | - | 20.0 GB |",
        "| prompt shared | 1.500 s, 20.0 GB | 3.000 s, 20.0 GB |",
        "| 2,048 (default) | 1.500 s | 20.0 GB |",
        "| 10 | 30.0 GB | 60.0 GB |",
        "| update | 2.00 |",
    ):
        assert line in text, text
    assert "make gpu" in text and "torch" in text
    assert "## " not in report.render({**plan.about(), "parity": {}, "figures": {}})


def test_a_pass_s_flops_are_two_per_parameter_and_token() -> None:
    shape = shapes.Shape(512, 8, 12, (1, 9), 1)
    config = shapes.model_config("qwen3_vl", shape)
    trees, images = shapes.inputs(config, shape)
    tokens = sum(tree.num_tokens for tree in trees)
    found = figures.Flops(config, images).language(trees)
    assert found == pytest.approx(2 * 1.41e9 * tokens, rel=0.05), "28 layers, little attention"
