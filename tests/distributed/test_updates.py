"""Optimizer steps: the same under every layout, nothing kept of a frozen tower, the reference put
back bit for bit.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megavlm.config.lora import LoRA
from megavlm.config.optimizer import Optimizer
from megavlm.data.packs.packing import Pack
from megavlm.families import family
from megavlm.models.build import build_model
from megavlm.models.common import config as model_config
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.loading import load_hf
from megavlm.models.common.logprobs import Scoring
from megavlm.models.common.lora import adapters, add_adapters
from megavlm.parallel import platform
from megavlm.parallel.collectives import reduce_measures
from megavlm.parallel.mesh import Mesh, build_mesh
from megavlm.process import NotFiniteError
from megavlm.training.forward_backward import compute_logprobs, forward_backward
from megavlm.training.guards import MAX_SKIPPED
from megavlm.training.losses import supervised_loss
from megavlm.training.optimizer import Updater, build_updater
from megavlm.training.reference import reference
from megavlm.training.step.vision_features import VisionFeatures
from tests.parity.cases import TREES_PER_PACK, packs_of
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import Sequences, distinct_images
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.operators import Operators

pytestmark = pytest.mark.distributed
ALL_LAYOUTS = LAYOUTS | EXPERT_LAYOUTS
local_layers = pytest.mark.skipif(
    platform.has_transformer_engine(), reason="it is about a GPU without Transformer Engine"
)
STEPS = 3
SETTINGS = Optimizer(lr=1e-3, clip_grad=0.5)


@cache
def history_of(folder: Path) -> Any:
    """Return how a model trains on one rank."""
    (found,) = launch(1, train, folder, LAYOUTS["one rank"])
    return found


@pytest.fixture
def folder() -> Path:
    return model_folder("qwen2_5_vl")


@dataclass
class Run:
    mesh: Mesh
    updater: Updater
    cases: list[Sequences]
    packs: list[Pack]

    def features(self) -> VisionFeatures:
        return VisionFeatures.everywhere(self.updater.chunks, distinct_images(self.cases))

    def forward_backward(self, features: VisionFeatures) -> list[Any]:
        self.updater.zero_gradients()
        targets = sum(len(response) for case in self.cases for response in case.responses)
        chunks = self.updater.chunks
        return forward_backward(chunks, self.packs, features, Scoring(), supervised_loss(targets))

    def logprobs(self, features: VisionFeatures) -> list[torch.Tensor]:
        """By pack, on the last stage."""
        scores = compute_logprobs(self.updater.chunks, self.packs, features, Scoring())
        return [pack_scores.logprobs for pack_scores in scores]

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for chunk in self.updater.chunks for p in chunk.parameters()]


def start(
    folder: Path,
    ranks: Ranks,
    *,
    frozen: bool,
    lora: LoRA | None = None,
    settings: Optimizer = SETTINGS,
    head: Literal["tokens", "both"] = "tokens",
    dtype: torch.dtype = torch.float32,
) -> Run:
    """A model and this rank's parts of its packs."""
    inputs = inputs_of(folder)
    config = inputs.config
    mesh = build_mesh(ranks.mesh)
    options = ModelOptions(
        sequence=ranks.sequence,
        freeze_tower=frozen,
        freeze_merger=frozen,
        head=head,
        dtype=dtype,
    )
    chunks = build_model(config, mesh, options)
    entries = family(config.model_type).mapping(config)
    for chunk in chunks:
        load_hf(chunk, entries, HFFolder(folder), mesh)
        if lora is not None:
            add_adapters(chunk, lora)
    updater = build_updater(chunks, settings, mesh, num_steps=STEPS)
    cases = inputs.sequences("mixed")
    mine = cases[mesh.data_rank :: mesh.data_size]
    groups = [mine[i : i + TREES_PER_PACK] for i in range(0, len(mine), TREES_PER_PACK)]
    packs = [pack.part(mesh.context_rank) for pack in packs_of(groups, config, ranks)]
    return Run(mesh, updater, cases, packs)


def train(folder: Path, ranks: Ranks) -> list[Any]:
    return history(start(folder, ranks, frozen=False))


def history(run: Run) -> list[Any]:
    """Per step: loss per token and gradient norm."""
    history = []
    for _ in range(STEPS):
        reports = run.forward_backward(run.features())
        measures = reduce_measures(reports, run.mesh)
        assert run.updater.gradients_are_finite()
        history.append([measures["loss"] / measures["tokens"], run.updater.step()["gradient_norm"]])
    return history


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen2_5_vl", "TP2+SP"),
        ("qwen3_vl_moe", "EP2 over TP2+SP"),
        *slow(
            ("qwen2_5_vl", "PP2 virtual 2"),
            ("qwen2_5_vl", "CP2xDP2"),
            ("qwen2_5_vl", "TP2xDP2"),
            ("qwen2_5_vl", "TP2+SPxPP2"),
            ("qwen3_vl_moe", "EP2"),
            ("qwen3_5", "TP2+SP"),
        ),
    ],
)
def test_three_updates_equal_one_rank(model: str, layout: str) -> None:
    """Of each way to cut the optimizer's work; tests/parity has the gradients of every layout."""
    check_updates(model_folder(model), ALL_LAYOUTS[layout])


def test_tied_embeddings_on_the_first_and_the_last_stage() -> None:
    check_updates(model_folder("qwen2_5_vl", tied=True), LAYOUTS["PP2"])


def check_updates(folder: Path, ranks: Ranks) -> None:
    expected = history_of(folder)
    assert expected[0][0] > expected[-1][0], "the loss falls"
    for history in launch(ranks.world_size, train, folder, ranks):
        np.testing.assert_allclose(history[0], expected[0], rtol=1e-6)
        # Adam divides by a gradient's own size: rounding in entries near zero grows with each step.
        np.testing.assert_allclose(history, expected, rtol=2e-5)


def train_with_fused_swiglu(folder: Path) -> list[Any]:
    """As `train`, on a GPU without Transformer Engine: its layers are a CPU's but for SwiGLU."""
    on_a_gpu = SimpleNamespace(has_gpu=lambda: True, has_transformer_engine=lambda: False)
    with mock.patch.object(model_config, "platform", on_a_gpu):
        run = start(folder, LAYOUTS["one rank"], frozen=False)
    config = run.updater.chunks[0].config
    assert config.bias_activation_fusion
    assert not (config.apply_rope_fusion or config.fused_weight_gradients)
    assert not (config.moe_grouped_gemm or config.moe_permute_fusion)
    return history(run)


@local_layers
@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_a_gpu_without_transformer_engine_makes_the_same_updates(model: str) -> None:
    folder = model_folder(model)
    (found,) = launch(1, train_with_fused_swiglu, folder)
    np.testing.assert_allclose(found, history_of(folder), rtol=2e-5)


def not_finite(folder: Path, ranks: Ranks, number: float) -> bool:
    run = start(folder, ranks, frozen=True)
    run.updater.zero_gradients()
    if run.mesh.rank == run.mesh.world_size - 1:
        chunk = run.updater.chunks[-1]
        (chunk.expert_parallel_buffers or chunk.buffers)[0].grad_data[3] = number
    return run.updater.gradients_are_finite()


@pytest.mark.parametrize(
    ("model", "layout", "number", "finite"),
    [
        ("qwen2_5_vl", "DP2", math.nan, False),
        ("qwen2_5_vl", "DP2", -math.inf, False),
        ("qwen2_5_vl", "DP2", 1e38, True),
        ("qwen2_5_vl", "PP2 virtual 2", math.nan, False),
        ("qwen3_vl_moe", "EP2", math.inf, False),
    ],
)
def test_what_is_not_finite_on_one_rank_is_known_on_all(
    model: str, layout: str, number: float, finite: bool
) -> None:
    """In the last chunk, and in an expert's gradient."""
    results = launch(2, not_finite, model_folder(model), ALL_LAYOUTS[layout], number)
    assert results == [finite, finite]


class Memory(TorchDispatchMode):
    """Sums the bytes that operators write to new memory."""

    num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        held = {x.untyped_storage().data_ptr() for x in args if torch.is_tensor(x)}
        if torch.is_tensor(result) and result.untyped_storage().data_ptr() not in held:
            self.num_bytes += result.nbytes
        return result


def memory_of_the_check(folder: Path) -> tuple[int, int]:
    run = start(folder, LAYOUTS["one rank"], frozen=True)
    gradients = sum(buffer.grad_data.nbytes for buffer in run.updater.chunks[0].buffers)
    with Memory() as memory:
        assert run.updater.gradients_are_finite()
    return memory.num_bytes, gradients


def test_the_check_for_finite_gradients_copies_none_of_them(folder: Path) -> None:
    """Not even as booleans: gradients are most of what a GPU holds then."""
    ((new, gradients),) = launch(1, memory_of_the_check, folder)
    assert 0 < new < 100 < gradients


def operators_of_a_step(folder: Path, frozen: bool) -> tuple[int, Any]:
    """Return the number of trained tensors, and the operators of an update after its backward, with
    the optimizer's kernel of a GPU.
    """
    run = start(folder, LAYOUTS["one rank"], frozen=frozen, dtype=torch.bfloat16)
    run.forward_backward(run.features())
    on_a_gpu = {"has_gpu": lambda: True, "device": lambda: torch.device("cpu")}
    with Operators() as operators, mock.patch.multiple(platform, **on_a_gpu):
        assert run.updater.gradients_are_finite()
        run.updater.step()
    tensors = [p for chunk in run.updater.chunks for p in chunk.parameters() if p.requires_grad]
    return len(tensors), operators.counts


@local_layers
def test_an_update_takes_all_tensors_at_once(folder: Path) -> None:
    """And reads two numbers: whether gradients are finite, and their norm."""
    (few, fewer), (many, more) = (
        launch(1, operators_of_a_step, folder, frozen)[0] for frozen in (True, False)
    )
    assert many > 2 * few > 50
    assert more == fewer
    assert more["aten::_local_scalar_dense"] == 2
    assert more["aten::_fused_adamw_"] and "aten::copy_" not in more


def skips(folder: Path, ranks: Ranks) -> list[Any]:
    """Updates of which the last rank's loss is NaN, after a good one: whether each was skipped,
    whether parameters, moments and learning rate are bit for bit as before, and how many a
    row of them may have.
    """
    run = start(folder, ranks, frozen=True)
    updater, features, is_last = run.updater, run.features(), run.mesh.rank == ranks.world_size - 1
    good = supervised_loss(20)

    def bad(pack: Pack, scores: Any) -> Any:
        loss, measures = good(pack, scores)
        return (loss * math.nan if is_last else loss), measures

    def state() -> list[torch.Tensor]:
        return [*run.parameters(), *(x.clone() for x in updater.state_tensors())]

    updater.update(run.packs, features, good, step=1)
    before, rate, skipped = state(), updater.learning_rate, []
    for step in range(2, 2 + MAX_SKIPPED):
        skipped.append(updater.update(run.packs, features, bad, step=step)["skipped_updates"])
    same = all(x.equal(y) for x, y in zip(before, state(), strict=True))
    is_same = same and updater.learning_rate == rate
    error = ""
    try:
        updater.update(run.packs, features, bad, step=9)
    except NotFiniteError as raised:
        error = str(raised)
    updater.skips.record(False, 10)  # a good one begins the count anew
    skipped.append(updater.update(run.packs, features, bad, step=11)["skipped_updates"])
    moments = any(x.abs().sum() > 0 for x in updater.state_tensors())
    return [skipped, is_same, error, moments]


@pytest.mark.parametrize("layout", ["DP2", *slow("TP2", "PP2")])
def test_a_nan_on_one_rank_skips_the_update_of_all_and_six_in_a_row_end_the_run(
    layout: str,
) -> None:
    """The exit code is of tests/unit/run/test_worker.py."""
    results = launch(2, skips, model_folder("qwen2_5_vl"), LAYOUTS[layout])
    for skipped, is_same, error, moments in results:
        assert skipped == [1.0] * (MAX_SKIPPED + 1) and is_same and moments
        assert error.startswith("step 9: the gradient was not finite 6 updates in a row; ")


def frozen_step(folder: Path, ranks: Ranks) -> list[Any]:
    """In a step of three passes: images encoded on this rank (None: it has no tower), distinct
    ones, features with a graph, gradient buffers of the tower.
    """
    run = start(folder, ranks, frozen=True)
    visual = run.updater.chunks[0].module.visual
    encoded: list[int] = []
    if visual is not None:
        visual.register_forward_pre_hook(lambda module, inputs: encoded.append(len(inputs[1])))
    features = run.features()
    for _ in range(2):
        run.logprobs(features)
    run.forward_backward(features)
    kept = {} if visual is None else features.of(run.packs[0])  # only the first stage has any
    graph = [key for key, feature in kept.items() if feature.requires_grad]
    tower = [] if visual is None else list(visual.named_parameters())
    buffers = [name for name, p in tower if hasattr(p, "main_grad")]
    count = None if visual is None else sum(encoded)
    return [count, len(distinct_images(run.cases)), graph, buffers]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen2_5_vl", "CP2"),
        ("qwen3_vl", "PP2 virtual 2"),
        *slow(("qwen2_5_vl", "TP2"), ("qwen2_5_vl", "TP2+SPxCP2"), ("qwen2_5_vl", "PP2")),
    ],
)
def test_a_frozen_tower_encodes_each_image_once_a_step_and_keeps_no_graph(
    model: str, layout: str
) -> None:
    ranks = LAYOUTS[layout]
    results = launch(ranks.world_size, frozen_step, model_folder(model), ranks)
    distinct = results[0][1]
    assert distinct == 7, "eight images and videos, one of which comes twice"
    encoded = [result[0] for result in results if result[0] is not None]
    assert len(encoded) == ranks.world_size // ranks.mesh.pipeline, "towers of the first stage"
    assert sum(encoded) == distinct and min(encoded) > 0
    assert all(result[2] == [] and result[3] == [] for result in results)


def swap(folder: Path, ranks: Ranks, lora: LoRA | None, trained_before: bool) -> list[Any]:
    """Whether log-probs under the reference are those of the start, bit for bit; whether an update
    changed them; whether the policy came back, bit for bit; whether the policy was the reference
    before, bit for bit.
    """
    run = start(folder, ranks, frozen=True, lora=lora)
    modules = [chunk.module for chunk in run.updater.chunks]
    found = [adapter for module in modules for _, adapter in adapters(module)]
    assert bool(found) == (lora is not None)
    for adapter in found if trained_before else ():
        for _, _, b in adapter.pairs():
            torch.nn.init.normal_(b, std=0.1)
    features = run.features()
    start_is = reference(modules)
    before = run.logprobs(features)
    with start_is.in_place():
        first = run.logprobs(features)
    run.forward_backward(features)
    run.updater.step()
    trained, after = run.parameters(), run.logprobs(features)
    with start_is.in_place():
        inside = run.logprobs(features)
    restored = [*run.parameters(), *run.logprobs(features)]
    same = [torch.equal(x, y) for x, y in zip(restored, [*trained, *after], strict=True)]
    return [
        all(torch.equal(x, y) for x, y in zip(before, inside, strict=True)),
        any(not torch.equal(x, y) for x, y in zip(before, after, strict=True)),
        all(same),
        all(torch.equal(x, y) for x, y in zip(before, first, strict=True)),
    ]


@pytest.mark.parametrize("start", ["weights", "new adapters", "trained adapters"])
@pytest.mark.parametrize("layout", ["one rank", "PP2", *slow("CP2")])
def test_reference_is_the_start_and_the_policy_comes_back(
    folder: Path, layout: str, start: str
) -> None:
    ranks = LAYOUTS[layout]
    lora = None if start == "weights" else LoRA(rank=2, alpha=4.0)
    *others, last = launch(ranks.world_size, swap, folder, ranks, lora, start == "trained adapters")
    assert last == [True] * 4
    for start_is, _, policy_is, was in others:  # an earlier stage has no log-probs
        assert start_is and policy_is and was
