"""The GPU kit's own code on a CPU: its stages with tiny models, their judgement, and the page."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.config.load import load
from megavlm.families import family as family_of
from megavlm.families import language_values
from megavlm.run.checks.preflight import check_server_args
from tests.benchmarks.results import replace_part
from tests.gpu import figures, grpo, linear_attention, page, parity, shapes, stage
from tests.gpu.grpo import Memory
from tests.gpu.stage import Part
from tests.support.releases import RELEASES
from tests.support.timeouts import scaled


def run_script(name: str, folder: Path) -> list[dict[str, Any]]:
    """Run a stage as on a GPU machine, with tiny models. Returns its lines."""
    variables = {shapes.SWITCH: "tiny", "OUT": str(folder), "PYTHON": sys.executable}
    command = ["bash", "tests/gpu/run.sh", name]
    reply = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    assert reply.stdout.splitlines() == lines, reply.stderr
    found = [json.loads(line) for line in lines]
    assert [line for line in found if line["fault"]] == [] and reply.returncode == 0
    return found


@pytest.mark.long
@pytest.mark.timeout(scaled(900))
def test_stage_a_runs_on_a_cpu(tmp_path: Path) -> None:
    lines = run_script("a", tmp_path)
    parts = {line["part"] for line in lines}
    assert parts >= {f"parity {family} tiny" for family in shapes.FAMILIES}
    assert parts >= {
        "machine",
        "updates",
        "linear_attention",
        "figures 3b",
        "figures 7b",
        "profile",
    }
    assert "| qwen3_vl tiny | sdpa, float32 |" in page.render({"a": lines})


@pytest.mark.long
@pytest.mark.xdist_group("sglang")
@pytest.mark.timeout(scaled(900))
@pytest.mark.parametrize(("name", "checks"), [("b", 12), ("c", 15), ("e", 8)])
def test_stages_with_a_server_run_on_a_cpu(name: str, checks: int, tmp_path: Path) -> None:
    """Also: the server's log comes back, and a step is a line."""
    lines = run_script(name, tmp_path)
    assert len(lines) >= checks, lines
    assert "rollout_server" in (tmp_path / f"{name}.log").read_text() or name == "b"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5_moe"])
def test_parity_on_transformer_engine_s_layers_runs_on_a_cpu(family: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.parity", family, "tiny", "engine"]
    variables = {shapes.SWITCH: "tiny", "MEGAVLM_GPU_PATH": "1"}
    reply = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    lines = [json.loads(line) for line in reply.stdout.splitlines()]
    assert [line for line in lines if line["fault"]] == [] and reply.returncode == 0, reply.stderr
    assert any(line["check"].startswith("flash, bfloat16") for line in lines)


@pytest.mark.parametrize("family", shapes.FAMILIES)
def test_wide_models_have_released_widths_and_few_layers(family: str) -> None:
    config = shapes.parity_config(family, "wide")
    published = RELEASES[shapes.WIDE[family]]
    text = language_values(published)
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert getattr(config.text_config, name) == text[name], name
    assert config.text_config.num_hidden_layers == 4
    assert len(family_of(family).tower(config).blocks) == 4
    assert family_of(family).mapping(config)


def errors(**values: float) -> dict[str, float]:
    same = {"rms": 1e-3, "max": 4e-3, "gradient": 1e-2, "shared_max": 0.0, "shared_gradient": 0.0}
    return same | values


@pytest.mark.parametrize(
    ("dtype", "found", "fault"),
    [
        (torch.bfloat16, errors(), None),
        (torch.bfloat16, errors(rms=2e-3), "rms"),
        (torch.bfloat16, errors(gradient=float("nan")), "gradient"),
        (torch.bfloat16, errors(shared_gradient=0.2), "shared_gradient"),
        (torch.float32, errors(rms=0, max=1e-5, gradient=1e-5), None),
        (torch.float32, errors(), "max"),
    ],
)
def test_parity_is_judged_by_transformers_own_error(
    dtype: torch.dtype, found: dict[str, float], fault: str | None
) -> None:
    variant = parity.Variant("flash", dtype, rule="torch")
    sentence = parity.fault_of(variant, found, errors())
    assert sentence is None if fault is None else str(sentence).startswith(f"{fault} is ")


@pytest.mark.parametrize("lost", ["state", "gradient of the state"])
def test_a_kernel_that_loses_a_parents_state_is_found(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = linear_attention.choose_rule()

    def broken(*inputs: Any, initial_state: torch.Tensor | None, **settings: Any) -> Any:
        given = None if lost == "state" or initial_state is None else initial_state.detach()
        return rule(*inputs, initial_state=given, **settings)

    def faults() -> list[str]:
        kernel = linear_attention.measure()["kernel"]
        return [x for x, error in kernel.items() if not error <= linear_attention.KERNEL_ERROR]

    monkeypatch.setenv(shapes.SWITCH, "tiny")
    assert faults() == []
    monkeypatch.setattr(linear_attention, "choose_rule", lambda: broken)
    assert len(faults()) >= 4


def steps(**values: Any) -> list[dict[str, Any]]:
    return [
        {"step": i, "sync_checked": 9, "skipped_updates": 0, "sync_bytes": 1e9, "sync_tensors": 9,
         "tokens_per_second": 100.0, "memory_gib": 3.0, "rollout_max_difference": 0.01,
         "rollout_train_kl": 1e-4, "seconds/update": 2.0, "seconds/total": 5.0, **values}
        for i in range(1, 11)
    ]  # fmt: skip


def memory(growth: float = 0.0, released: float = 30e9) -> Memory:
    """Return samples of ten steps, each of which needs 60 GB at most."""
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
        (steps()[:3], memory(), "3 steps of 10"),
        (steps(sync_checked=0), memory(), "no checksum"),
        (steps(skipped_updates=1), memory(), "skipped"),
        (steps(), memory(growth=1e9), "memory grew by 6.0"),
        (steps(), memory(released=0), "nothing was released"),
    ],
)
def test_a_run_is_judged(run: list[dict[str, Any]], used: Memory, fault: str | None) -> None:
    case = replace(grpo.CASES["rest"], steps=10)
    found = grpo.faults_of(run, used, int(80e9), case)
    assert (found == []) if fault is None else (fault in found[0])


@pytest.mark.parametrize("is_tiny", [True, False])
@pytest.mark.parametrize("name", grpo.CASES)
def test_a_run_s_recipe_is_valid(
    name: str, is_tiny: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_tiny:
        monkeypatch.setenv(shapes.SWITCH, "tiny")
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(grpo.recipe(tmp_path, name)))
    config = load(path)
    assert config.rollout.colocate and config.rollout.sync == "tensor"
    assert config.algorithm.steps == min(grpo.CASES[name].steps, 3 if is_tiny else 20)
    check_server_args(config.rollout)


def test_a_stage_ends_within_a_command_of_ten_minutes() -> None:
    for each in stage.stages().values():
        assert each.limit + stage.GRACE < 600
        assert all(part.limit <= each.limit for group in each.groups for part in group)
    assert [*stage.stages()["c"].groups[0]] == [Part("grpo", ("first",), 170)]
    names = [group[0].module for group in stage.stages()["a"].groups]
    assert names.index("profile") < max(i for i, name in enumerate(names) if name == "parity")


def test_the_page_is_as_the_results_say(tmp_path: Path) -> None:
    copy = tmp_path / "GPU.md"
    copy.write_text(page.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    replace_part("results", page.render(page.read_results()), copy)
    assert copy.read_text() == page.PAGE.read_text(), "run: python -m tests.gpu.page"


def test_a_pass_s_flops_are_two_per_parameter_and_token() -> None:
    config = shapes.config_of("Qwen3-VL-2B")
    trees, images = shapes.inputs(config, shapes.Shape(8, 12, (1, 9), 1))
    tokens = sum(tree.num_tokens for tree in trees)
    found = figures.Flops(config, images).language(trees)
    logits = 2 * 9 * 151936 * 2048
    layers = 2 * 1.41e9 * tokens  # 28 layers, with little attention
    assert found == pytest.approx(layers + logits, rel=0.05)
