"""Bugs that other stacks have had, each put into our own code: with it a comparison fails by far,
without it it holds. So the tests would see the bug come.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from checkpoint_tools.export_hf import export_hf
from checkpoint_tools.import_hf import import_hf
from megavlm.config.lora import LoRA
from megavlm.data.processor import ProcessedImage
from megavlm.models.common import deepstack
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.lora import adapters, add_adapters
from tests.parity.cases import Differences, compare, expected_of, packs_of
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.peer_bugs import (
    BUGS,
    Bug,
    Inject,
    leaf_names,
    one_ulp,
    tanh_gelu,
    unread_switches,
    vision_qkv_by_head,
)
from tests.parity.reference import Reference, Sequences, distinct_images
from tests.parity.runs import Run, build, difference
from tests.parity.table import LAYOUTS, Case, Ranks
from tests.parity.test_parity import NORM_TOLERANCE, TOLERANCE
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = pytest.mark.parity
FAR = 100 * TOLERANCE
# The two forms of GELU differ by 5e-4 at most, whatever comes in.
FAR_FOR_GELU = 10 * TOLERANCE


def arguments_of(case: Case) -> tuple[Any, ...]:
    """Return the arguments of `compare`."""
    inputs = inputs_of(model_folder(case.family))
    sequences = inputs.sequences(case.inputs)
    return inputs.folder, inputs.config, case, sequences, expected_of(inputs, case)


def without_and_with(
    inject: Inject, function: Callable[..., Any], *arguments: Any
) -> tuple[Any, Any]:
    """What a function gives on this rank without a bug, and with it."""
    return function(*arguments), with_bug(inject, function, *arguments)


def with_bug(inject: Inject, function: Callable[..., Any], *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        inject(patch)
        return function(*arguments)


def assert_equals_transformers(results: Sequence[Differences]) -> None:
    for result in results:
        assert result.logits < TOLERANCE
        assert result.gradients < TOLERANCE, result.parameter
        assert result.norm < NORM_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_comparison_with_transformers(bug: Bug) -> None:
    case = Case(bug.family, bug.layout, bug.inputs, bug.options)
    arguments = (bug.inject, compare, *arguments_of(case))
    results = launch(case.ranks.world_size, without_and_with, *arguments)
    without, broken = zip(*results, strict=True)
    assert_equals_transformers(without)
    far = FAR_FOR_GELU if bug.inject is tanh_gelu else FAR
    assert max(max(result.logits, result.gradients) for result in broken) > far


# 2


def test_adapters_stay_out_of_the_tower() -> None:
    folder = model_folder("qwen3_vl")
    config = inputs_of(folder).config
    ((without, broken),) = launch(1, without_and_with, leaf_names, adapted, folder, config)
    assert without and all(name.startswith("language_model.") for name in without)
    assert any(name.startswith("visual.") for name in broken)


def adapted(folder: Path, config: Any) -> list[str]:
    """What adapters are put on if nothing says where; and a leaf name is not an answer."""
    _, _, (chunk,) = build(folder, config, Ranks(), ModelOptions())
    with pytest.raises(ValueError, match="holds 'linear_fc1': choose from"):
        LoRA(rank=2, targets=("linear_fc1",)).check()
    add_adapters(chunk, LoRA(rank=2, alpha=4))
    return [name for name, _ in adapters(chunk)]


def test_a_towers_merged_adapters_are_the_adapters() -> None:
    folder = model_folder("qwen3_vl")
    inputs = inputs_of(folder)
    arguments = folder, inputs.config, inputs.sequences("one image")
    ((without, broken),) = launch(1, without_and_with, vision_qkv_by_head, merged, *arguments)
    assert without < TOLERANCE and broken > FAR


def merged(folder: Path, config: Any, cases: Sequence[Sequences]) -> float:
    """The model with adapters on the tower, against transformers with their merged weights."""
    run = Run.start(folder, config, Ranks(), ModelOptions(), distinct_images(cases))
    (chunk,) = run.chunks
    add_adapters(chunk, LoRA(rank=2, alpha=4, targets=("vision.attention",)))
    reference = Reference(folder)
    weights = dict(reference.model.named_parameters())
    entries = {entry.megatron: entry for entry in run.entries}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, layer in adapters(chunk):
            for b in layer.lora_B.values():
                b.normal_(std=0.2, generator=generator)
            entry = entries[f"{name}.weight"]
            for hf, tensor in zip(entry.hf, entry.to_hf(layer.merged_weight()), strict=True):
                weights[hf].copy_(tensor)
        theirs = [reference.scores(case.prompt, r).logits for case in cases for r in case.responses]
    ours = run.logits(packs_of([[case] for case in cases], config, Ranks()))
    return difference(torch.cat(ours), torch.cat(theirs))


# 6


def test_conversion_is_compared_bit_by_bit(tmp_path: Path) -> None:
    folder = model_folder("qwen2_5_vl", bf16=True)

    def converted(name: str) -> tuple[list[str], list[str]]:
        """Tensors that are not equal after import and export, and those beyond a tolerance."""
        import_hf(folder, tmp_path / name)
        export_hf(tmp_path / name, tmp_path / f"{name}_hf")
        before, after = HFFolder(folder), HFFolder(tmp_path / f"{name}_hf")
        assert set(before) == set(after)
        unequal = [x for x in before if not torch.equal(before[x], after[x])]
        return unequal, [x for x in unequal if not torch.allclose(before[x], after[x], atol=0.1)]

    assert converted("without") == ([], [])
    with pytest.MonkeyPatch.context() as patch:
        one_ulp(patch)
        unequal, beyond = converted("broken")
    assert unequal and not beyond


# 7


@pytest.mark.parametrize(
    ("layout", "levels"), [("PP4", [[0], [1], [2], []]), ("PP2 virtual 2", [[0, 2], [1]])]
)
def test_every_stage_adds_its_levels(layout: str, levels: Any) -> None:
    folder, ranks = model_folder("qwen3_vl"), LAYOUTS[layout]
    inputs = inputs_of(folder)
    arguments = folder, inputs.config, inputs.sequences("one image"), ranks
    assert launch(ranks.world_size, added_levels, *arguments) == levels


def added_levels(folder: Path, config: Any, cases: Sequence[Sequences], ranks: Ranks) -> list[int]:
    run = Run.start(folder, config, ranks, ModelOptions(), distinct_images(cases))
    added = set()
    plain = deepstack.StageLayout.level

    def level(self: deepstack.StageLayout, levels: Tensor, index: int) -> Tensor:
        added.add(index)
        return plain(self, levels, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepstack.StageLayout, "level", level)
        run.logits(packs_of([[case] for case in cases], config, ranks))
    return sorted(added)


# 8

EVERYTHING = ["has a buffer", "has gradients", "keeps activations", "requires gradients"]


@pytest.mark.parametrize("family", ["qwen3_vl", *slow("qwen2_5_vl")])
@pytest.mark.parametrize(
    ("frozen", "tower", "merger"),
    [
        ((False, False), EVERYTHING, EVERYTHING),
        ((True, False), [], EVERYTHING),
        ((False, True), EVERYTHING, ["keeps activations"]),  # the tower's gradient passes through
        ((True, True), [], []),
    ],
)
def test_switches_are_read(
    family: str, frozen: tuple[bool, bool], tower: list[str], merger: list[str]
) -> None:
    folder = model_folder(family)
    inputs = inputs_of(folder)
    options = ModelOptions(freeze_tower=frozen[0], freeze_merger=frozen[1])
    arguments = folder, inputs.config, options, inputs.sequences("one image")
    ((without, broken),) = launch(1, without_and_with, unread_switches, training, *arguments)
    assert without == {"tower": tower, "merger": merger}
    assert broken == {"tower": EVERYTHING, "merger": EVERYTHING}


def training(
    folder: Path, config: Any, options: ModelOptions, cases: Sequence[Sequences]
) -> dict[str, list[str]]:
    """What the tower and its mergers show of training; "partly" if not all of their parameters."""
    run = Run.start(folder, config, Ranks(), options, distinct_images(cases))
    visual = run.chunks[0].visual
    gradients = run.backward(packs_of([[case] for case in cases], config, Ranks()))
    kept = activations(visual, next(iter(run.images.values())))
    of_mergers = {id(x) for merger in visual.mergers() for x in merger.parameters()}
    found = {}
    for part in ("tower", "merger"):
        parameters = {
            f"visual.{name}": x
            for name, x in visual.named_parameters()
            if (id(x) in of_mergers) is (part == "merger")
        }
        signs = {
            "requires gradients": [x.requires_grad for x in parameters.values()],
            "has a buffer": [hasattr(x, "main_grad") for x in parameters.values()],
            "has gradients": [
                bool(gradients[x, None].any()) if (x, None) in gradients else False
                for x in parameters
            ],
            "keeps activations": [part in kept],
        }
        found[part] = sorted(
            sign if all(shown) else f"partly {sign}" for sign, shown in signs.items() if any(shown)
        )
    return found


def activations(visual: Any, image: ProcessedImage) -> set[str]:
    """In which of the tower and its mergers a forward pass keeps something for backward."""
    kept, inside = set[str](), ["tower"]

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            kept.add(inside[-1])
        return tensor

    for merger in visual.mergers():
        merger.register_forward_pre_hook(lambda *_: inside.append("merger"))
        merger.register_forward_hook(lambda *_: inside.remove("merger"))
    with saved_tensors_hooks(note, lambda tensor: tensor):
        visual(image.patches(), [image.grid])
    return kept


# 15


@pytest.mark.parametrize("layout", ["CP2", "PP2", *slow("DP2", "TP2")])
def test_packs_without_images(layout: str) -> None:
    """A rank without images takes part in backward. If what it gave to the gather had no graph, the
    rank that has the image would wait for it, and the test would time out.
    """
    case = Case("qwen3_vl", layout, "few images")
    assert_equals_transformers(launch(2, compare, *arguments_of(case)))
