"""The draft head equals transformers' modules on plain sequences, with images and branches."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.models.common.loading import MEMORY, HubTensors
from megavlm.models.common.mapping import shard_tensor
from tests.parity.cases import packs_of
from tests.parity.draft_heads import Headed, expect, with_random_head
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import Sequences
from tests.parity.runs import Name, difference
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.cache import cached_folder, cached_value
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = pytest.mark.parity
TOLERANCE = 1e-5
INPUTS = ("mixed", "branches")


CASES = [
    ("qwen3_5", "TP2+SPxCP2"),
    ("qwen3_vl", "PP2 virtual 2xCP2"),
    *slow(
        ("qwen2_5_vl", "TP2+SPxPP2"),
        ("qwen3_vl", "one rank"),
        ("qwen3_vl", "TP2+SPxPP2"),
        ("qwen3_vl", "TP2+SPxCP2"),
        ("qwen3_vl_moe", "EP2 over TP2+SP"),
        ("qwen3_vl_moe", "EP2xPP2 virtual 2"),
        ("qwen3_5", "one rank"),
        ("qwen3_5", "PP2 virtual 2xCP2"),
        ("qwen3_5", "TP2+SPxPP2"),
        ("qwen3_5_moe", "EP2 over TP2+SP"),
        ("qwen3_5_moe", "EP2xPP2 virtual 2"),
    ),
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_the_head_equals_transformers(family: str, layout: str) -> None:
    source = model_folder(family)
    name = f"draft-head-{source.name}"
    folder = cached_folder(name, "", lambda target: with_random_head(source, target))
    made = inputs_of(source)
    cases = [case for name in INPUTS for case in made.sequences(name)]
    (expected,) = cached_value(name, INPUTS, lambda: launch(1, expect, folder, cases))
    ranks = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    arguments = folder, made.config, cases, expected, ranks
    for results in launch(ranks.world_size, compare, *arguments):
        for name, value in results.items():
            assert value < TOLERANCE, (name, value)


def compare(
    folder: Path, config: Any, cases: Sequence[Sequences], expected: Any, ranks: Ranks
) -> dict[str, float]:
    """The largest relative differences on this rank. Of gradients of the policy, with the head and
    without it, any difference counts as 1.
    """
    with_head = Headed(folder, config, ranks, head=True)
    mesh = with_head.mesh
    mine = [*range(len(cases))][mesh.data_rank :: mesh.data_size]
    groups = [[cases[i] for i in mine[j : j + 3]] for j in range(0, len(mine), 3)]
    packs = packs_of(groups, config, ranks)
    passed = with_head.backward(packs, cases)
    results = {}
    starts = [0]
    for case in cases:
        starts.append(starts[-1] + len(case.responses))
    if passed.seen:
        weight = with_head.run.chunks[-1].language_model.output_weight().detach()
        group = mesh.groups.tp
        theirs = [
            [i for case in mine[j : j + 3] for i in range(starts[case], starts[case + 1])]
            for j in range(0, len(mine), 3)
        ]
        worst = {"logits": 0.0, "divergences": 0.0}
        for (pack, values, hidden), index in zip(passed.seen, theirs, strict=False):
            local = hidden @ weight.t()
            shards = [torch.empty_like(local) for _ in range(group.size())]
            dist.all_gather(shards, local, group=group)
            logits = torch.cat(shards, -1)
            for name, ours in (("logits", logits), ("divergences", values)):
                whole = torch.cat([torch.from_numpy(expected[name][i]) for i in index])
                scale = torch.ones(1) if name == "divergences" else whole  # nats
                if len(ours):
                    theirs_here = whole[pack.target_index]
                    worst[name] = max(worst[name], difference(ours, theirs_here, scale))
        results |= worst
        hf = {name: torch.from_numpy(x) for name, x in expected["gradients"].items()}
        results |= dict(_head_gradients(with_head, passed.summed, hf))
    # Before the sum over ranks, whose order depends on the size of the buffers.
    without = Headed(folder, config, ranks, head=False).backward(packs, cases)
    for name, gradient in without.own.items():
        changed = not torch.equal(passed.own[name], gradient)
        results[f"with and without the head, {name}"] = float(changed)
    return results


def _head_gradients(
    headed: Headed, gradients: dict[Name, Tensor], hf: dict[str, Tensor]
) -> Iterator[tuple[str, float]]:
    entries = [x for x in headed.entries if x.megatron.startswith("draft_head.")]
    hub = HubTensors(entries, hf, MEMORY)
    for entry in entries:
        name = entry.megatron, entry.expert
        if name not in gradients:
            assert entry.expert is not None
            continue
        full = hub.read(entry)
        theirs = shard_tensor(entry, full, *headed.mesh.place(entry.shard.axis))
        yield f"gradient of {name}", difference(gradients[name], theirs, full)
