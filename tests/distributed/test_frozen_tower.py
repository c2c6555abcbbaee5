"""A frozen tower keeps nothing for backward and encodes an image once a step; a trained one has
the right gradients on ranks that encode none.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.training.forward_backward import compute_logprobs, forward_backward
from megavlm.training.step.rank_images import RankImages
from tests.parity.cases import packs_of
from tests.parity.inputs import image, inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import Sequences, distinct_images
from tests.parity.runs import Run, difference, weighted
from tests.parity.table import LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = pytest.mark.distributed
FROZEN = ModelOptions()
TRAINED = ModelOptions(freeze_tower=False, freeze_merger=False)
MERGER_TRAINED = ModelOptions(freeze_merger=False)


@pytest.fixture(scope="module", params=["qwen3_vl", *slow("qwen2_5_vl")])
def model(request: pytest.FixtureRequest) -> tuple[Path, Any]:
    """A folder and its configuration."""
    folder = model_folder(request.param)
    return folder, inputs_of(folder).config


def test_a_frozen_tower_keeps_nothing(model: tuple[Path, Any]) -> None:
    cases = inputs_of(model[0]).sequences("one image")
    for options, keeps in ((FROZEN, False), (MERGER_TRAINED, True), (TRAINED, True)):
        for num_saved, has_graph in launch(2, kept, *model, options, cases):
            assert (num_saved > 0) is keeps
            assert has_graph == [keeps] * len(cases)


def kept(
    folder: Path, config: Any, options: ModelOptions, cases: Sequence[Sequences]
) -> tuple[int, list[bool]]:
    """On one of two tensor ranks: tensors that are saved for backward where a pack's images are
    encoded, and which of the images' features have a graph.
    """
    ranks = LAYOUTS["TP2"]
    run = Run.start(folder, config, ranks, options, distinct_images(cases))
    (pack,) = packs_of([cases], config, ranks)
    saved = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        encoded = run.features().of(pack)
    return len(saved), [feature.requires_grad for feature in encoded.values()]


@pytest.mark.parametrize("layout", ["PP2xCP2", *slow("one rank", "TP2xCP2")])
def test_each_image_is_encoded_once_a_step(model: tuple[Path, Any], layout: str) -> None:
    """By the ranks of the first stage together, each its share of the cost."""
    ranks = LAYOUTS[layout]
    cases = inputs_of(model[0]).sequences("mixed")
    shown = [image.key for case in cases for image in case.prompt.images]
    images = distinct_images(cases)
    assert len(images) < len(shown), "some images are shown twice"
    grids = [image.grid for image in images.values()]
    costs = [t * h * w * (1 + h * w / 4096) for t, h, w in grids]
    keys, num_shares = list(images), ranks.mesh.tensor * ranks.mesh.context
    shares = RankImages.everywhere(images, num_shares).plan.shares_of(range(len(keys)))
    expected = [[keys[index] for index in share] for share in shares]
    later_stages = [[]] * (ranks.world_size - num_shares)

    encoded = launch(ranks.world_size, encoded_in_a_step, *model, cases, ranks)
    assert encoded == expected + later_stages
    assert sorted(chain(*encoded)) == sorted(images)
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs)


def encoded_in_a_step(
    folder: Path, config: Any, cases: Sequence[Sequences], ranks: Ranks
) -> list[str]:
    """Keys of what this rank's tower is given in a step of three passes over several packs."""
    run = Run.start(folder, config, ranks, FROZEN, distinct_images(cases))
    packs = packs_of([cases[:3], cases[3:5], cases[5:]], config, ranks)
    parts = [pack.part(run.mesh.context_rank) for pack in packs]
    keys: list[str] = []

    def note(tower: Any, inputs: tuple[Tensor, Sequence[Any]]) -> None:
        patches, grids = inputs
        for piece in patches.split([t * h * w for t, h, w in grids]):
            keys.extend(
                key for key, image in run.images.items() if torch.equal(image.patches(), piece)
            )

    if run.chunks[0].visual is not None:
        run.chunks[0].visual.register_forward_pre_hook(note)
    features = run.features()
    for _ in range(2):
        compute_logprobs(run.wrapped, parts, features, Scoring())
    forward_backward(run.wrapped, parts, features, Scoring(), weighted)
    return keys


@pytest.mark.parametrize("layout", ["TP2+SPxCP2", *slow("TP4", "CP4")])
def test_gradients_are_right_where_a_rank_has_no_image(
    model: tuple[Path, Any], layout: str
) -> None:
    """One pack shows one image, the other two; there are four ranks."""
    make = inputs_of(model[0])
    cases = [
        make.case(1, images=[image(128, 96, 1)]),
        make.case(2, images=[image(64, 96, 2), image(96, 96, 3)]),
    ]
    ((expected, _),) = launch(1, tower_gradients, *model, cases, LAYOUTS["one rank"])
    results = launch(4, tower_gradients, *model, cases, LAYOUTS[layout])
    assert [num_images for _, num_images in results] == [2, 1, 0, 0]
    for gradients, _ in results:
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            whole = torch.from_numpy(expected[name])
            assert difference(torch.from_numpy(gradient), whole) < 1e-5, name


def tower_gradients(
    folder: Path, config: Any, cases: Sequence[Sequences], ranks: Ranks
) -> tuple[dict[str, Tensor], int]:
    """By name; and the number of images that this rank encoded for them."""
    run = Run.start(folder, config, ranks, TRAINED, distinct_images(cases))
    num_images: list[int] = []
    run.chunks[0].visual.register_forward_pre_hook(
        lambda tower, inputs: num_images.append(len(inputs[1]))
    )
    gradients = run.backward(packs_of([[case] for case in cases], config, ranks))
    of_tower = {key: x for (key, _), x in gradients.items() if key.startswith("visual.")}
    return of_tower, sum(num_images)
