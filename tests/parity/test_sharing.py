"""Packs and shared prompts change nothing: the loss and the gradient are those of each response by
itself, and no sample sees another.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megavlm.data.packs.packing import Pack, make_pack
from megavlm.data.packs.trees import Tree, prompt_tree
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.training.forward_backward import forward_backward
from megavlm.training.losses import supervised_loss
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import Sequences, distinct_images
from tests.parity.runs import Run
from tests.parity.table import LAYOUTS
from tests.support.columns import columns
from tests.support.families import vision_tokens
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = pytest.mark.parity
TOLERANCE = 1e-6


def tree(case: Sequences, responses: Sequence[Sequence[int]]) -> Tree:
    return prompt_tree(case.prompt, responses, [columns(len(x)) for x in responses])


def compare(folder: Path) -> tuple[dict[str, float], bool, bool]:
    """Relative differences of loss and gradient from one pack with shared prompts; whether another
    sample's tokens change a sample's logits, and their own.
    """
    inputs = inputs_of(folder)
    config, cases = inputs.config, inputs.sequences("mixed")
    options = ModelOptions(freeze_tower=False, freeze_merger=False)
    run = Run.start(folder, config, LAYOUTS["one rank"], options, distinct_images(cases))
    num_targets = sum(len(response) for case in cases for response in case.responses)

    def pack(trees: Sequence[Tree]) -> Pack:
        return make_pack(trees, vision_token_ids=vision_tokens(config))

    def measured(packs: Sequence[Pack]) -> tuple[torch.Tensor, torch.Tensor]:
        for chunk in run.wrapped:
            chunk.zero_grad_buffer()
        loss = supervised_loss(num_targets)
        reports = forward_backward(run.wrapped, packs, run.features(), Scoring(), loss)
        gradients = [p.main_grad.flatten().double() for c in run.chunks for p in c.parameters()]
        return sum(r["loss"].double() for r in reports) / num_targets, torch.cat(gradients)

    whole = [tree(case, case.responses) for case in cases]
    packed = measured([pack(whole)])
    results = {}
    for name, packs in {
        "unpacked": [pack([one]) for one in whole],
        "repeated prompts": [pack([tree(case, [x])]) for case in cases for x in case.responses],
        "packed, repeated prompts": [pack([tree(c, [x]) for c in cases for x in c.responses])],
    }.items():
        other = measured(packs)
        results[f"loss, {name}"] = float((packed[0] - other[0]).abs() / other[0].abs())
        results[f"gradient, {name}"] = float((packed[1] - other[1]).norm() / other[1].norm())

    first = cases[0]
    changed = replace(first, responses=[[(i + 1) % 250 for i in x] for x in first.responses])
    (before,) = run.logits([pack(whole)])
    (after,) = run.logits([pack([tree(changed, changed.responses), *whole[1:]])])
    own = sum(map(len, first.responses))
    return results, before[own:].equal(after[own:]), before[:own].equal(after[:own])


@pytest.mark.parametrize("model", ["qwen2_5_vl", *slow("qwen3_vl", "qwen3_5")])
def test_loss_and_gradient_are_those_of_each_response_by_itself(model: str) -> None:
    ((results, others_are_equal, own_are_equal),) = launch(1, compare, model_folder(model))
    for name, value in results.items():
        assert value <= TOLERANCE, f"{name}: {value}"
    assert others_are_equal, "to the last bit"
    assert not own_are_equal
