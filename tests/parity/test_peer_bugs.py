"""Bugs that other stacks have had, each put into our own code: with it the comparison with
transformers is far off, without it within the bounds. So the parity tests would see it come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megavlm.data.packing import Pack
from megavlm.models.common import deepstack, language, model, vision_merge
from megavlm.models.common.tower import Tower
from megavlm.models.common.value_head import ValueHead
from tests.distributed.fork import launch
from tests.parity import cases
from tests.parity.cases import Differences, Expected, compare, expect
from tests.parity.inputs import Inputs, picture
from tests.parity.models import make_model
from tests.parity.reference import Sequences
from tests.parity.table import OPTIONS, Case
from tests.parity.test_parity import NORM_TOLERANCE, TOLERANCE

pytestmark = pytest.mark.parity

Patch = pytest.MonkeyPatch
FAR = 100 * TOLERANCE


# The bugs


def nested_list(patch: Patch) -> None:
    """DeepStack levels leave a recomputed region in a list, where autograd does not see them."""
    plain = Tower.run_blocks

    def run_blocks(self: Tower, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, list]:
        return checkpoint(lambda x: plain(self, x, *args, **options), x, use_reentrant=True)

    patch.setattr(Tower, "run_blocks", run_blocks)


def captured_levels(patch: Patch) -> None:
    """Recomputed layers reach for the levels instead of being given them."""
    held: list[Tensor | None] = []
    plain_model, plain_layer = language.LanguageModel.forward, deepstack.DeepStackLayer.forward

    def of_model(self: Any, hidden: Tensor, levels: Tensor | None, *args: Any) -> Tensor:
        held[:] = [levels]
        return plain_model(self, hidden, None, *args)

    def of_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain_layer(self, *args, **kwargs | {"context": held[0]})[0], None

    patch.setattr(language.LanguageModel, "forward", of_model)
    patch.setattr(deepstack.DeepStackLayer, "forward", of_layer)


def tanh_gelu(patch: Patch) -> None:
    """Only mergers have the module."""
    patch.setattr(nn.GELU, "forward", lambda self, x: F.gelu(x, approximate="tanh"))


def slice_without_sum(patch: Patch) -> None:
    """The gather's backward takes a rank's own rows and leaves what other ranks know of them."""

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.start : ctx.start + ctx.count], None, None, None

    patch.setattr(vision_merge._GatherShares, "backward", staticmethod(backward))


def scaled_scatter(patch: Patch) -> None:
    plain = model.scatter_to_sequence_parallel_region

    def scatter(x: Tensor, *, group: Any) -> Tensor:
        x = plain(x, group=group)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / group.size())
        return x

    patch.setattr(model, "scatter_to_sequence_parallel_region", scatter)


def first_stage_only(patch: Patch) -> None:
    plain = deepstack.StageLayout.level

    def level(self: deepstack.StageLayout, levels: Tensor, index: int) -> Tensor:
        return plain(self, levels, index) * (self.first_level == 0)

    patch.setattr(deepstack.StageLayout, "level", level)


def unused_head(patch: Patch) -> None:
    patch.setattr(ValueHead, "forward", lambda self, hidden: 0 * hidden.float().sum(1))


def counted_over_the_row(patch: Patch) -> None:
    """A segment starts where the one before it in the row ended."""
    plain = cases.make_pack

    def make_pack(*args: Any, **options: Any) -> Pack:
        pack = plain(*args, **options)
        start, pieces = 0, []
        bounds = pack.segment_bounds
        for first, end in zip(bounds, bounds[1:], strict=False):
            positions = pack.positions[:, first:end]
            pieces.append(positions - positions[0, 0] + start)
            start = int(pieces[-1].max()) + 1
        return replace(pack, positions=torch.cat(pieces, dim=1))

    patch.setattr(cases, "make_pack", make_pack)


def counted_over_the_part(patch: Patch) -> None:
    """A context rank counts the tokens that it holds."""
    plain = Pack.part

    def part(self: Pack, context_rank: int) -> Pack:
        held = plain(self, context_rank)
        return replace(held, positions=torch.arange(len(held.token_ids)).expand(3, -1))

    patch.setattr(Pack, "part", part)


@dataclass(frozen=True)
class Bug:
    inject: Callable[[Patch], None]
    family: str
    layout: str
    inputs: str = "one image"
    options: str = ""


BUGS = {
    "1 full recompute drops DeepStack's gradient": Bug(
        nested_list, "qwen3_vl", "one rank", options="recompute full"
    ),
    "1b": Bug(captured_levels, "qwen3_vl", "one rank", options="recompute full"),
    "3 tanh-GELU in the merger of Qwen2.5-VL": Bug(tanh_gelu, "qwen2_5_vl", "one rank"),
    "3 tanh-GELU in the mergers of Qwen3-VL": Bug(tanh_gelu, "qwen3_vl", "one rank"),
    "4 CP gather whose backward only slices": Bug(
        slice_without_sum, "qwen2_5_vl", "CP2", "straddling"
    ),
    "5 SP scatter scales by 1/TP": Bug(scaled_scatter, "qwen2_5_vl", "TP2+SP"),
    "7 DeepStack on the first stage only": Bug(first_stage_only, "qwen3_vl", "PP4"),
    "7 DeepStack on the first chunk only": Bug(first_stage_only, "qwen3_vl", "PP2 virtual 2"),
    "9 shared critic's head unused, TP2": Bug(
        unused_head, "qwen2_5_vl", "TP2", options="shared critic"
    ),
    "9 separate critic's head unused, PP2": Bug(
        unused_head, "qwen2_5_vl", "PP2", options="separate critic"
    ),
    "9 separate critic's head unused, CP2": Bug(
        unused_head, "qwen2_5_vl", "CP2", options="separate critic"
    ),
    "10 M-RoPE over the packed row": Bug(
        counted_over_the_row, "qwen2_5_vl", "one rank", "branches"
    ),
    "10 M-RoPE over a context rank's part": Bug(
        counted_over_the_part, "qwen2_5_vl", "CP2", "branches"
    ),
}


class Models:
    """Models, inputs and what transformers computes, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._inputs: dict[str, Inputs] = {}
        self._expected: dict[Any, Expected] = {}

    def folder(self, family: str) -> Path:
        folder = self._root / family
        if family not in self._inputs:
            launch(1, make_model, folder, family, False)
            self._inputs[family] = Inputs(folder)
        return folder

    def inputs(self, family: str) -> Inputs:
        self.folder(family)
        return self._inputs[family]

    def arguments(self, case: Case, sequences: Sequence[Sequences] | None = None) -> tuple:
        """Of `compare`. `sequences`: in place of the case's own."""
        folder, inputs = self.folder(case.family), self.inputs(case.family)
        head = OPTIONS[case.options].head
        if sequences is None:
            sequences = inputs.sequences(case.inputs)
        key = (case.family, case.inputs, head)
        if key not in self._expected:
            (self._expected[key],) = launch(1, expect, folder, sequences, head)
        return folder, inputs.config, case, sequences, self._expected[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def without_and_with(
    inject: Callable[[Patch], None], *arguments: Any
) -> tuple[Differences, Differences]:
    without = compare(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        inject(patch)
        return without, compare(*arguments)


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_the_bug_would_be_seen(models: Models, bug: Bug) -> None:
    case = Case(bug.family, bug.layout, bug.inputs, bug.options)
    results = launch(case.ranks.world_size, without_and_with, bug.inject, *models.arguments(case))
    for without, _ in results:
        assert without.logits < TOLERANCE
        assert without.gradients < TOLERANCE
        assert without.norm < NORM_TOLERANCE
    for without, broken in results:
        print(without, broken)
    assert max(max(broken.logits, broken.gradients) for _, broken in results) > FAR
