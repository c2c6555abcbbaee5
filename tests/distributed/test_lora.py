"""Whole models with adapters: equal to transformers with merged weights under every layout, logits
and gradients; equal to their base where adapters are off.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.config.lora import LoRA
from megavlm.models.common.lora import adapters, adapters_disabled
from megavlm.models.common.lora_linear import is_adapter
from megavlm.parallel.mesh import Layout
from tests.parity.cases import gradient_norm
from tests.parity.inputs import inputs_of
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.cache import cached_value
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.lora_reference import ALPHA, RANK, Name, expect, projections
from tests.support.lora_runs import (
    DENSE,
    EXPERTS,
    LINEAR,
    TOWER,
    Run,
    cut,
    lora_folder,
    main_gradients,
    set_pairs,
    start,
)

pytestmark = pytest.mark.distributed

RANKS = LAYOUTS | EXPERT_LAYOUTS | {"ETP2": Ranks(Layout(expert_tensor=2), data=2)}
CASES = [
    ("qwen2_5_vl", "TP2+SP", DENSE + TOWER),
    ("qwen2_5_vl", "PP2 virtual 2", DENSE + TOWER),
    ("qwen3_vl_moe", "EP2 over TP2+SP", EXPERTS),
    ("qwen3_5", "TP2+SP", LINEAR),
    *slow(
        ("qwen3_vl_moe", "ETP2", EXPERTS),
        ("qwen3_5", "CP2", LINEAR),
        ("glm4v", "TP2", DENSE + TOWER),
        ("glm4v", "TP2+SP", DENSE),
        ("glm4v_moe", "EP2 over TP2+SP", (*DENSE, "language.experts")),
        ("internvl", "TP2", DENSE + TOWER),
        ("minicpmv4_6", "TP2", LINEAR + TOWER),
        ("internvl_moe", "EP2 over TP2+SP", EXPERTS),
        ("qwen3_5_moe", "EP2 over TP2+SP", (*LINEAR, "language.experts")),
        ("qwen3_omni_moe", "EP2 over TP2+SP", EXPERTS + TOWER),
        ("qwen2_5_vl", "TP4", DENSE),  # more ranks than key-value heads
        ("qwen2_5_vl", "TP2xCP2", DENSE + TOWER),
        ("qwen3_vl_moe", "one rank", EXPERTS + TOWER),
    ),
]


def expected(folder: Path, targets: tuple[str, ...]) -> dict[str, Any]:
    """Return what transformers computes."""
    return cached_value(
        f"lora-{folder.name}", targets, lambda: launch(1, expect, folder, targets)[0]
    )


@pytest.mark.parametrize(("model", "layout", "targets"), CASES)
def test_equals_transformers_with_merged_weights(
    model: str, layout: str, targets: tuple[str, ...]
) -> None:
    folder, ranks = lora_folder(model), RANKS[layout]
    theirs = expected(folder, targets)
    names: set[Name] = set()
    for result in launch(ranks.world_size, compare, folder, ranks, targets, theirs):
        assert result["new adapters change nothing"] and result["off is the base"]
        assert result["keys"] and result["nothing else is trained"]
        assert result["logits"] < 1e-5 and result["merged"] < 1e-5
        assert result["gradients"] < 1e-5, result["worst"]
        assert result["norm"] < 1e-6
        names |= set(result["names"])
    assert names == set(projections(inputs_of(folder).config, targets))


def compare(
    folder: Path, ranks: Ranks, targets: tuple[str, ...], theirs: dict[str, Any]
) -> dict[str, Any]:
    """Largest relative differences on this rank; which projections it has adapters for."""
    run = start(folder, ranks)
    settings = LoRA(rank=RANK, alpha=ALPHA, targets=targets)
    base, keys = run.logits(by_pack=settings.adapts_tower), checkpoint_keys(run)
    run.add(settings)
    new = run.logits()
    set_pairs(run)
    on = run.logits()
    with adapters_disabled(run.whole):
        off = run.logits()
    run.backward()
    worst, parameter, names = gradient_difference(run, theirs["gradients"])
    squares = [(x.astype("float64") ** 2).sum() for xs in theirs["gradients"].values() for x in xs]
    result = {
        "new adapters change nothing": all(map(torch.equal, new, base)),
        "off is the base": all(map(torch.equal, off, base)),
        "keys": {key for key in checkpoint_keys(run) if not is_adapter(key)} == keys,
        "nothing else is trained": all(
            is_adapter(name) == parameter.requires_grad
            for name, parameter in run.whole.named_parameters()
        ),
        "logits": logits_difference(run, on, theirs["logits"]),
        "gradients": worst,
        "worst": parameter,
        "names": names,
        "norm": abs(gradient_norm(run.wrapped) / sum(squares) ** 0.5 - 1),
    }
    for _, layer in adapters(run.whole):
        layer.weight.data.copy_(layer.merged_weight())
    with adapters_disabled(run.whole):
        result["merged"] = logits_difference(run, run.logits(), theirs["logits"])
    return result


def checkpoint_keys(run: Run) -> set[str]:
    metadata = {"non_homogeneous_layers": True}
    states = [chunk.sharded_state_dict(metadata=dict(metadata)) for chunk in run.chunks]
    return {value.key for state in states for value in state.values()}


def logits_difference(run: Run, ours: Sequence[Tensor], theirs: Any) -> float:
    worst = 0.0
    for pack, group, result in zip(run.packs, run.groups, ours, strict=False):  # padding is last
        whole = torch.cat([torch.from_numpy(x) for index in group for x in theirs[index]])
        if len(result):
            worst = max(worst, difference(result, whole[pack.target_index], whole))
    return worst


def gradient_difference(run: Run, theirs: Any) -> tuple[float, Name | None, list[Name]]:
    """The largest, where it is, and all that was compared."""
    found = {}
    for name, layer in adapters(run.whole):
        for part, (a, b) in main_gradients(layer).items():
            whole_a, whole_b = map(torch.from_numpy, theirs[name, part])
            a_expected, b_expected = cut(layer, whole_a, whole_b)
            found[name, part] = max(
                difference(a, a_expected, whole_a), difference(b, b_expected, whole_b)
            )
    worst = max(found, key=lambda name: found[name], default=None)
    return found[worst] if worst else 0.0, worst, list(found)


def difference(ours: Tensor, theirs: Tensor, scale: Tensor) -> float:
    return (ours - theirs).abs().max().item() / max(scale.abs().max().item(), 1e-8)
