"""The first hour on a GPU: parity of every attention kernel, a colocated GRPO run, and figures.

`make gpu` runs them on one 80 GB GPU without a network, in nine minutes at most, and writes
tests/benchmarks/GPU.md. With MEGAVLM_GPU_TESTS=tiny the same bodies run on a CPU.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.parallel import platform
from tests.gpu import grpo, plan, shapes

pytestmark = [
    pytest.mark.skipif(
        not (torch.cuda.is_available() or shapes.is_tiny()),
        reason="needs a GPU: `make gpu` runs these",
    ),
    pytest.mark.xdist_group("gpu"),
    pytest.mark.slow,
    pytest.mark.timeout(540),
]
GRPO_FAMILY = "qwen3_vl"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Collects what is measured; written to the page whatever fails."""
    found: dict[str, Any] = {"parity": {}, "figures": {}}
    yield found
    path = tmp_path_factory.mktemp("gpu") / "GPU.md" if shapes.is_tiny() else None
    plan.write(found, path)


@pytest.mark.parametrize("family", shapes.RELEASED)
def test_every_kernel_is_as_close_to_fp32_as_transformers(
    family: str, results: dict[str, Any]
) -> None:
    found = plan.part("parity", family)
    results["parity"][shapes.NAMES[family]] = found
    assert len(found) > 1 and plan.parity_faults(found) == []


def test_a_colocated_run_syncs_and_returns_its_memory(
    tmp_path: Path, results: dict[str, Any]
) -> None:
    recipe = Path(plan.part("grpo", str(tmp_path), GRPO_FAMILY))
    steps, memory = grpo.run(recipe, plan.LIMITS["run"])
    results["grpo"] = {"model": shapes.NAMES[GRPO_FAMILY], **grpo.summary(steps, memory)}
    total = torch.cuda.get_device_properties(0).total_memory if platform.has_gpu() else 0
    assert len(steps) == (3 if shapes.is_tiny() else grpo.STEPS)
    assert plan.grpo_faults(steps, memory, total) == []


@pytest.mark.skipif(
    not (shapes.is_tiny() or find_spec("fla")),
    reason="needs flash-linear-attention: megavlm[linear-attention]",
)
def test_linear_attentions_kernel_follows_trees(results: dict[str, Any]) -> None:
    found = plan.part("linear_attention")
    results["linear attention"] = found
    assert plan.kernel_faults(found) == []


@pytest.mark.parametrize("family", shapes.RELEASED)
def test_figures_are_measured(family: str, results: dict[str, Any]) -> None:
    found = plan.part("figures", family)
    results["figures"][shapes.NAMES[family]] = found
    assert all(row["seconds"] > 0 for row in found["phases"] + found["chunks"])
