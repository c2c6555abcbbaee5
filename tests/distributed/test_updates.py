"""Optimizer steps: the same under every layout, nothing kept of a frozen tower, the reference put
back bit for bit.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megavlm.config.schema import Optimizer
from megavlm.data.packing import Pack
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.models.common.loading import HFFolder, load_hf
from megavlm.models.common.logprobs import Scoring
from megavlm.models.registry import build_model, family
from megavlm.parallel.collectives import reduce_measures
from megavlm.parallel.mesh import Mesh, build_mesh
from megavlm.training.optimizer import Updater, build_updater
from megavlm.training.passes import VisionFeatures, forward_backward, score
from megavlm.training.policy_loss import supervised_loss
from megavlm.training.reference import ReferenceWeights
from tests.distributed.fork import launch
from tests.parity.cases import Layout, pack_of
from tests.parity.reference import Sequences, distinct_pictures
from tests.parity.test_qwen2_5_vl import picture

pytestmark = pytest.mark.distributed
QUESTION = "Which is more frequent, red or blue?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, [QUESTION] * 10, seed=1, num_layers=2, init_std=0.05)
    return folder


@dataclass
class Run:
    mesh: Mesh
    updater: Updater
    cases: list[Sequences]
    packs: list[Pack]

    def features(self) -> VisionFeatures:
        return VisionFeatures(self.updater.model, distinct_pictures(self.cases))


def start(folder: Path, layout: Layout, *, frozen: bool) -> Run:
    """A model and this rank's packs of eight rows that show six pictures."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    mesh = build_mesh(tensor=layout.tensor)
    model = build_model(
        config,
        mesh,
        dtype=torch.float32,
        sequence=layout.sequence,
        freeze_tower=frozen,
        freeze_merger=frozen,
    )
    load_hf(
        model,
        family(config.model_type).mapping(config),
        HFFolder(folder),
        mesh.tensor_rank,
        mesh.tensor_size,
    )
    updater = build_updater(model, Optimizer(lr=1e-3, clip_grad=0.5), num_steps=3)
    processor = Processor(folder, min_pixels=None, max_pixels=None)
    generator = np.random.default_rng(0)
    cases = []
    for index in range(8):
        row = Row(
            index,
            "<image>" + QUESTION[: 10 + index],
            "",
            (picture(56, 56 + 28 * (index % 3), index % 6),),
            "",
            "",
        )
        responses = [generator.integers(0, 200, 2 + index % 4).tolist() for _ in range(2)]
        cases.append(Sequences(processor.prompt(row), responses))
    mine = cases[mesh.data_rank :: mesh.data_size]
    packs = [
        pack_of(mine[i : i + 2], config.image_token_id, 2 * layout.tensor)
        for i in range(0, len(mine), 2)
    ]
    return Run(mesh, updater, cases, packs)


def num_targets(cases: list[Sequences]) -> int:
    return sum(len(response) for case in cases for response in case.responses)


def train(folder: Path, layout: Layout) -> list[Any]:
    """Per step: loss per token and gradient norm."""
    run = start(folder, layout, frozen=False)
    history = []
    for _ in range(3):
        run.updater.zero_gradients()
        loss = supervised_loss(num_targets(run.cases))
        reports = forward_backward(run.updater.model, run.packs, run.features(), Scoring(), loss)
        measures = reduce_measures(reports, run.mesh)
        assert run.updater.gradients_are_finite()
        history.append([measures["loss"] / measures["tokens"], run.updater.step()])
    return history


@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2), Layout(tensor=2, sequence=True), Layout(data=2), Layout(tensor=2, data=2)],
    ids=str,
)
def test_three_updates_equal_one_rank(folder: Path, layout: Layout) -> None:
    (expected,) = launch(1, train, folder, Layout())
    assert expected[0][0] > expected[2][0], "the loss falls"
    for history in launch(layout.world_size, train, folder, layout):
        np.testing.assert_allclose(history[0], expected[0], rtol=1e-6)
        # Adam divides by a gradient's own size: rounding in entries near zero grows with each step.
        np.testing.assert_allclose(history, expected, rtol=2e-5)


def not_finite(folder: Path) -> bool:
    run = start(folder, Layout(data=2), frozen=True)
    run.updater.zero_gradients()
    if run.mesh.rank == 1:
        run.updater.model.buffers[0].grad_data[3] = float("nan")
    return run.updater.gradients_are_finite()


def test_nan_on_one_rank_is_known_on_all(folder: Path) -> None:
    assert launch(2, not_finite, folder) == [False, False]


def frozen_step(folder: Path) -> list[Any]:
    """Pictures encoded on this rank in a step of three passes, trainable tower parameters, their
    gradient buffers.
    """
    run = start(folder, Layout(tensor=2), frozen=True)
    visual = run.updater.model.module.visual
    encoded: list[int] = []
    visual.register_forward_pre_hook(lambda module, inputs: encoded.append(len(inputs[1])))
    features = run.features()
    for _ in range(2):
        score(run.updater.model, run.packs, features, Scoring())
    forward_backward(run.updater.model, run.packs, features, Scoring(), supervised_loss(10))
    graph = [key for key, feature in features.of(run.packs[0]).items() if feature.requires_grad]
    buffers = [name for name, p in visual.named_parameters() if hasattr(p, "main_grad")]
    return [sum(encoded), len(distinct_pictures(run.cases)), graph, buffers]


def test_a_frozen_tower_encodes_each_picture_once_a_step_and_keeps_no_graph(folder: Path) -> None:
    results = launch(2, frozen_step, folder)
    distinct = results[0][1]
    assert distinct == 6, "eight rows, two of whose pictures come twice"
    assert sum(result[0] for result in results) == distinct
    assert all(result[2] == [] and result[3] == [] for result in results)


def swap(folder: Path) -> list[Any]:
    run = start(folder, Layout(), frozen=True)
    model = run.updater.model
    features = run.features()
    reference = ReferenceWeights(model.module)
    before = score(model, run.packs, features, Scoring())[0].logprobs
    run.updater.zero_gradients()
    forward_backward(model, run.packs, features, Scoring(), supervised_loss(10))
    run.updater.step()
    trained = [p.detach().clone() for p in model.module.parameters()]
    after = score(model, run.packs, features, Scoring())[0].logprobs
    with reference.in_place():
        inside = score(model, run.packs, features, Scoring())[0].logprobs
    same = all(torch.equal(p, q) for p, q in zip(model.module.parameters(), trained, strict=True))
    return [before, after, inside, same]


def test_reference_is_the_start_and_the_policy_comes_back(folder: Path) -> None:
    ((before, after, inside, same),) = launch(1, swap, folder)
    assert (before == inside).all() and (before != after).any() and same
