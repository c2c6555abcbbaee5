"""Replayed routed experts under every kind of layout: logits and every gradient, the routers'
included, against transformers with the same experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.data.packs.trees import Tree, prompt_tree
from megavlm.data.processor import Prompt
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import MEMORY
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import (
    Reference,
    Scores,
    Sequences,
    distinct_images,
    token_weights,
)
from tests.parity.runs import Run, difference
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.parity.test_tree_packs import packs
from tests.support.cache import cached_value
from tests.support.columns import columns
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = pytest.mark.parity
TOLERANCE = 1e-5
OPTIONS = {
    "": ModelOptions(freeze_tower=False, freeze_merger=False),
    "recompute full": ModelOptions(freeze_tower=False, freeze_merger=False, recompute="full"),
    "recompute experts": ModelOptions(
        freeze_tower=False, freeze_merger=False, recompute="selective", recompute_modules=("moe",)
    ),
}
QUICK = [
    ("qwen3_vl_moe", "TP2+SP", ""),
    ("qwen3_vl_moe", "PP2 virtual 2", "recompute experts"),
    ("qwen3_vl_moe", "CP2", "recompute full"),
    ("qwen3_5_moe", "EP2 over TP2+SP", ""),
    ("qwen3_5_moe", "PP2", "recompute experts"),
]
SLOW = [
    ("qwen3_vl_moe", "one rank", ""),
    ("qwen3_vl_moe", "TP2+SPxPP2 virtual 2", "recompute full"),
    ("qwen3_vl_moe", "EP2 over CP2", "recompute experts"),
    ("qwen3_5_moe", "one rank", "recompute full"),
    ("qwen3_5_moe", "TP2+SPxCP2", "recompute experts"),
    ("qwen3_5_moe", "expert TP2+SP", ""),
]


def routes_of(token_ids: Tensor, config: Any) -> Tensor:
    """Return routed experts [S, layers, top-k] that depend on a token, its place and the layer."""
    text = config.text_config
    layers, experts = text.num_hidden_layers, text.num_experts
    seeds = (token_ids * 131 + torch.arange(len(token_ids)) * 7).tolist()
    drawn = [
        torch.rand(layers, experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)
        for seed in seeds
    ]
    return torch.stack(drawn)[..., : text.num_experts_per_tok].to(torch.uint8)


class RoutedReference(Reference):
    """transformers' model with `routes_of` each sequence in place of its routers' choice."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for index, layer in enumerate(self.model.model.language_model.layers):
            if gate := getattr(layer.mlp, "gate", None):
                gate.forward = partial(self.route, gate, index)

    def scores(self, prompt: Prompt, response: Sequence[int]) -> Scores:
        ids = torch.cat([prompt.token_ids, torch.tensor(response)])
        self.routed_experts = routes_of(ids, self.config).long()
        return super().scores(prompt, response)

    def route(self, gate: Any, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, chosen = hidden @ gate.weight.t(), self.routed_experts[:, layer]
        weights = logits.float().softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


def expect(folder: Path, cases: Sequence[Sequences]) -> dict[str, Any]:
    reference = RoutedReference(folder)
    with torch.no_grad():
        scores = [reference.scores(case.prompt, r) for case in cases for r in case.responses]
    return {
        "logits": torch.cat([score.logits for score in scores]),
        "gradients": reference.gradients(cases),
    }


def trees(cases: Sequence[Sequences], config: Any) -> list[Tree]:
    """Return trees with routed experts of all tokens but each response's last."""
    made = []
    for case in cases:
        weights = [token_weights(len(r), i) for i, r in enumerate(case.responses)]
        of_targets = [columns(len(x), loss_weights=x) for x in weights]
        root, *rest = prompt_tree(case.prompt, case.responses, of_targets).segments
        start, segments = len(root.token_ids), []
        for segment in rest:
            ids = torch.cat([root.token_ids, segment.token_ids])
            segments.append(replace(segment, routed_experts=routes_of(ids, config)[start:-1]))
        routed = replace(root, routed_experts=routes_of(root.token_ids, config))
        made.append(Tree((routed, *segments)))
    return made


@pytest.mark.parametrize(("family", "layout", "options"), [*QUICK, *slow(*SLOW)])
def test_equals_transformers_with_the_same_experts(family: str, layout: str, options: str) -> None:
    inputs = inputs_of(model_folder(family))
    cases = inputs.sequences("mixed")[:4]
    expected = cached_value(
        f"routed-{inputs.folder.name}", "", lambda: launch(1, expect, inputs.folder, cases)[0]
    )
    ranks = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    arguments = inputs.folder, inputs.config, cases, expected, ranks, OPTIONS[options]
    for results in launch(ranks.world_size, compare, *arguments):
        assert results.pop("logits without replay") > 1e-2
        for name, value in results.items():
            assert value < TOLERANCE, name


def compare(
    folder: Path,
    config: Any,
    cases: Sequence[Sequences],
    expected: dict[str, Any],
    ranks: Ranks,
    options: ModelOptions,
) -> dict[str, float]:
    """The largest relative differences on this rank."""
    run = Run.start(folder, config, ranks, options, distinct_images(cases))
    made = trees(cases, config)
    routed = packs([made[:2], made[2:]], config, ranks)
    theirs = torch.from_numpy(expected["logits"])
    others = run.logits([pack.without_routed_experts() for pack in routed])
    results = {
        "logits": difference(torch.cat(run.logits(routed)), theirs),
        "logits without replay": difference(torch.cat(others), theirs),
    }
    gradients = run.backward(routed)
    hf = {name: torch.from_numpy(x) for name, x in expected["gradients"].items()}
    for name, (theirs, scale) in run.shards(hf, MEMORY).items():
        results[f"gradient of {name}"] = difference(gradients[name], theirs, scale)
        if "router" in name[0]:
            assert gradients[name].abs().max() > 0
    return results
