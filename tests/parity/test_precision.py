"""bf16 as in production: gradients and optimizer in fp32, and logits no further from the exact ones
than transformers' own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.config.optimizer import Optimizer
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.training.forward_backward import forward_backward
from megavlm.training.optimizer import Updater, build_updater
from megavlm.training.step.vision_features import VisionFeatures
from tests.parity.cases import TREES_PER_PACK, packs_of
from tests.parity.inputs import Inputs, image, inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import Reference, Sequences, distinct_images
from tests.parity.runs import Run, build, weighted
from tests.parity.table import FAMILIES, LAYOUTS, Ranks
from tests.support.cache import cached_value
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = pytest.mark.parity
BF16 = torch.bfloat16
SPREAD = 1.25


@pytest.fixture(scope="module", params=FAMILIES)
def expected(request: pytest.FixtureRequest) -> tuple[str, dict[str, Tensor]]:
    """A model, and transformers' logits."""
    folder = model_folder(request.param, bf16=True)
    arguments = (1, expect, folder, two_cases(inputs_of(folder)))
    (found,) = cached_value(f"precision-{folder.name}", "", lambda: launch(*arguments))
    return request.param, {name: torch.from_numpy(x) for name, x in found.items()}


def two_cases(make: Inputs) -> list[Sequences]:
    """Up to positions that bf16 does not hold, beyond 256."""
    return [
        make.case(1, images=[image(96, 64, 1)], responses=(400,)),
        make.case(2, images=[image(64, 128, 2)], responses=(20, 30)),
    ]


def expect(folder: Path, cases: Sequence[Sequences]) -> dict[str, Tensor]:
    return {
        name: transformers_logits(folder, cases, dtype)
        for name, dtype in (("fp32", torch.float32), ("bf16", BF16))
    }


@torch.no_grad()
def transformers_logits(folder: Path, cases: Sequence[Sequences], dtype: torch.dtype) -> Tensor:
    reference = Reference(folder, dtype)
    scores = [reference.scores(case.prompt, r).logits for case in cases for r in case.responses]
    return torch.cat(scores).float()


@pytest.mark.parametrize("layout", ["TP2+SP", *slow("CP2", "one rank", "PP2")])
def test_logits_are_no_further_off_than_transformers(
    expected: tuple[str, dict[str, Tensor]], layout: str
) -> None:
    model, theirs = expected
    folder, ranks = model_folder(model, bf16=True), LAYOUTS[layout]
    inputs = inputs_of(folder)
    arguments = folder, inputs.config, two_cases(inputs), ranks
    error = error_of_most if model.endswith("_moe") else error_of_all
    allowed = SPREAD * error(theirs["bf16"] - theirs["fp32"])
    for ours in launch(ranks.world_size, logits, *arguments):
        assert error(torch.from_numpy(ours) - theirs["fp32"]) <= allowed


def error_of_all(differences: Tensor) -> float:
    return differences.square().mean().sqrt().item()


def error_of_most(differences: Tensor) -> float:
    """Of the middle token: where a router's two best are nearly equal, any rounding sends a token
    to another expert, in transformers as here, and such a token outweighs all others.
    """
    return differences.square().mean(1).sqrt().median().item()


def logits(folder: Path, config: Any, cases: Sequence[Sequences], ranks: Ranks) -> Tensor:
    run = Run.start(folder, config, ranks, ModelOptions(dtype=BF16), distinct_images(cases))
    groups = [cases[i : i + TREES_PER_PACK] for i in range(0, len(cases), TREES_PER_PACK)]
    return torch.cat(run.logits(packs_of(groups, config, ranks)))


STEPS = 3


@pytest.mark.parametrize("model", ["qwen3_vl", *slow("qwen3_5")])
def test_updates_are_in_fp32_and_equal_under_data_parallelism(model: str) -> None:
    folder = model_folder(model, bf16=True)
    inputs = inputs_of(folder)
    arguments = folder, inputs.config, two_cases(inputs)
    (alone,) = launch(1, train, *arguments, LAYOUTS["one rank"])
    for result in launch(2, train, *arguments, LAYOUTS["DP2"]):
        kept = ["torch.float32"] if model == "qwen3_5" else []  # A_log
        assert result["dtypes"] == {
            "parameters": ["torch.bfloat16", *kept],
            "gradients": ["torch.float32"],
            "optimized": ["torch.float32"],
            "state": ["torch.float32"],
        }
        for name, values in result["parameters"].items():
            before, after, other = map(torch.from_numpy, (*alone["parameters"][name], values[1]))
            assert not torch.equal(after, before), f"{name} is trained"
            assert torch.equal(other, after), name


def train(folder: Path, config: Any, cases: Sequence[Sequences], ranks: Ranks) -> dict[str, Any]:
    """Parameters before and after some updates, and the dtypes of what an update needs."""
    options = ModelOptions(dtype=BF16, freeze_tower=False, freeze_merger=False)
    mesh, _, chunks = build(folder, config, ranks, options)
    (chunk,) = chunks
    # Two microbatches, of a case each under either layout: they round alike wherever they run, and
    # a sum of two has no order. The norm's sum has one, so nothing is clipped.
    updater = build_updater(chunks, Optimizer(lr=1e-2, clip_grad=0), mesh, num_steps=STEPS)
    before = {name: x.detach().float().clone() for name, x in chunk.named_parameters()}
    packs = packs_of([[case] for case in cases[mesh.data_rank :: mesh.data_size]], config, ranks)
    for _ in range(STEPS):
        updater.zero_gradients()
        features = VisionFeatures.everywhere(updater.chunks, distinct_images(cases))
        forward_backward(updater.chunks, packs, features, Scoring(), weighted)
        updater.step()
    return {
        "parameters": {
            name: (before[name], x.detach().float()) for name, x in chunk.named_parameters()
        },
        "dtypes": {name: sorted(map(str, found)) for name, found in dtypes(updater).items()},
    }


def dtypes(updater: Updater) -> dict[str, set[torch.dtype]]:
    parameters: list[Any] = [x for chunk in updater.chunks for x in chunk.parameters()]
    (optimizer,) = updater.optimizer.chained_optimizers
    optimized = [x for group in optimizer.param_groups for x in group["params"]]
    states = [optimizer.optimizer.state[x] for x in optimized]
    return {
        "parameters": {x.dtype for x in parameters},
        "gradients": {x.main_grad.dtype for x in parameters},
        "optimized": {x.dtype for x in optimized},
        "state": {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")},
    }
