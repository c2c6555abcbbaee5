"""Runs of fifty steps whose servers get changes (`rollout.sync_delta`): every update is verified by
checksums of the whole weights, so a server's bytes are those that a whole update would bring.
"""

from typing import Any

import pytest

from megavlm.demo.data import DemoData
from megavlm.demo.tiny_model import make_tiny_model
from tests.e2e.conftest import World

pytestmark = [pytest.mark.sglang, pytest.mark.long]

STEPS = 50
GRPO = {
    "name": "grpo",
    "steps": STEPS,
    "prompts_per_step": 4,
    "responses_per_prompt": 2,
    "entropy_coefficient": 0.01,  # the gradient is never zero, even where no response is right
}
LORA = {"rank": 4, "alpha": 16, "targets": ["language.attention", "language.experts"]}
FP8_SIZES = {
    "hidden_size": 256,
    "ffn_size": 512,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 128,
    "vision_ffn_size": 256,
}
CASES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"parallel": {"tensor": 2, "pipeline": 2, "first_stage_layers": 1, "data": 2}},
    "qwen3_vl_moe": {"parallel": {"data": 2, "expert": 2}},
    "qwen3_vl_moe merged": {"parallel": {"data": 2, "expert": 2}, "lora": LORA},
    "qwen3_5": {"parallel": {"tensor": 2, "sequence": True}, "rollout": {"sync": "distributed"}},
    "qwen3_vl fp8": {
        "rollout": {"quantization": "fp8", "tensor_parallel": 1},
        "algorithm": {"importance": "token"},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_fifty_steps(world: World, case: str) -> None:
    family, name = case.split()[0], case.replace(" ", "_")
    model = world.root / f"delta_{name}"
    sets = (world.root / f"data/{part}.parquet" for part in ("train", "test", "warm_start"))
    sizes = FP8_SIZES if "fp8" in case else {}
    make_tiny_model(model, DemoData(*sets, "task").texts(), seed=0, family=family, **sizes)
    sections = {
        "model": {"folder": str(model), "dtype": "bfloat16"},
        "optimizer": {"lr": 1e-5},
        "algorithm": GRPO,
        "rollout": {"tensor_parallel": 2, "sync_delta": True, "max_restarts": 0},
    }
    for section, values in CASES[case].items():
        sections[section] = sections.get(section, {}) | values
    recipe = world.recipe(f"run_{name}", **sections)
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    _, *later = world.metrics(f"run_{name}")
    assert len(later) == STEPS - 1 and "checksum" not in done.stderr
    assert max(step["sync_density"] for step in later) < 0.2
