"""Images of a step over ranks: each is read and encoded by one, and its features reach those that
show it.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.config.load import load
from megavlm.data.packs.trees import prompt_tree
from megavlm.data.processor import Processor
from megavlm.data.rows import Rows
from megavlm.families import family_of
from megavlm.models.common.config import ModelOptions
from megavlm.training.step.image_plan import plan_images
from megavlm.training.step.rank_batch import share_batch
from megavlm.training.step.rank_images import ImagePlace, ImageReader, image_places
from megavlm.training.step.step_plan import PackShape, StepPlan, shown_images
from megavlm.training.step.vision_features import VisionFeatures
from tests.conftest import write_rows
from tests.parity.inputs import image
from tests.parity.models import model_folder
from tests.parity.runs import build
from tests.parity.table import LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = pytest.mark.distributed
SHARED = image(96, 96, 0)  # in rows of both data ranks
ROUND_PATCHES = 30  # one image of these, or two small ones


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    rows = [
        {"problem": "?", "answer": "!", "task": "", "images": [SHARED, image(64, 96, index)]}
        for index in range(1, 5)
    ]
    path = folder / "recipe.yaml"
    text = {
        "run": {"dir": str(folder / "run")},
        "model": {"folder": str(model_folder("qwen2_5_vl"))},
        "data": {"train_files": [write_rows(folder / "rows.parquet", rows)]},
        "algorithm": {"name": "sft", "steps": 1},
    }
    path.write_text(json.dumps(text))  # JSON is YAML
    return path


def plan_of(processor: Processor, rows: Rows, mesh: Any, tower_trained: bool) -> StepPlan:
    """Two packs for each data rank; the last prompt's own image is not of the data."""
    drawn = [processor.prompt(row) for row in rows]
    drawn[-1] = processor.prompt(replace(rows[3], images=(SHARED, image(128, 64, 9))))
    trees = [prompt_tree(prompt, [[5, 6]]) for prompt in drawn]
    share = len(trees) // mesh.data_size
    minibatches = [
        [[[tree] for tree in trees[start : start + share]]] for start in range(0, len(trees), share)
    ]
    images = {image.key: image for prompt in drawn for image in prompt.images}
    layout, places = mesh.layout, image_places([processor.prompt(row) for row in rows])
    return StepPlan(
        minibatches=minibatches,
        images=plan_images(
            [shown_images(minibatches) for minibatches in minibatches],
            {key: image.grids for key, image in images.items()},
            {key: float(image.num_patches) for key, image in images.items()},
            slots=layout.tensor * layout.context,
            round_patches=ROUND_PATCHES if mesh.world_size > 1 else None,
        ),
        sources={key: places.get(image.digest, image) for key, image in images.items()},
        num_tokens=sum(tree.num_tokens for tree in trees),
        tower_trained=tower_trained,
        shape=PackShape(
            vision_token_ids=processor.vision_token_ids,
            context_size=layout.context,
        ),
    )


def step(recipe: Path, ranks: Ranks, tower_trained: bool) -> dict[str, Any]:
    """What this rank gets, encodes and has in the end."""
    config = load(recipe)
    from transformers import AutoConfig

    options = ModelOptions(freeze_tower=not tower_trained)
    folder = Path(config.model.folder)
    mesh, _, chunks = build(folder, AutoConfig.from_pretrained(folder), ranks, options)
    plan = None
    if mesh.is_driver:
        rows = Rows(config.data.train_files, config.data)
        plan = plan_of(Processor(folder, config.data, family_of(folder)), rows, mesh, tower_trained)
    batch = share_batch(plan, mesh, ImageReader(config), torch.device("cpu"))
    sources = dict(batch.images._sources)
    encoded: list[list[tuple[int, int, int]]] = []  # grids of each forward
    if (visual := chunks[0].visual) is not None:
        visual.register_forward_pre_hook(lambda tower, inputs: encoded.append(inputs[1]))
    wrapped: Any = [type("Wrapped", (), {"module": chunk}) for chunk in chunks]
    features = VisionFeatures(wrapped, batch.images, device_bytes=1000)
    held: list[Tensor] = []
    for pack in batch.packs if visual is not None else ():
        of_pack = features.of(pack)
        held.append(torch.cat([of_pack[key] for key in pack.images]))
    return {
        "data_rank": mesh.data_rank,
        "stage": mesh.pipeline_rank,
        "places": sorted(key for key, x in sources.items() if isinstance(x, ImagePlace)),
        "pixels": sorted(key for key, x in sources.items() if not isinstance(x, ImagePlace)),
        "shown": [pack.images for pack in batch.packs],
        "encoded": encoded,
        "features": held,
    }


@pytest.mark.parametrize(
    ("layout", "tower_trained"),
    [("TP2xDP2", False), ("PP2xDP2", False), *slow(("CP2xDP2", False), ("TP2xDP2", True))],
)
def test_each_image_reaches_the_rank_that_encodes_it(
    recipe: Path, layout: str, tower_trained: bool
) -> None:
    ranks = LAYOUTS[layout]
    (alone,) = launch(1, step, recipe, LAYOUTS["one rank"], tower_trained)
    found = launch(ranks.world_size, step, recipe, ranks, tower_trained)
    first = [rank for rank in found if rank["stage"] == 0]
    later = [rank for rank in found if rank["stage"] > 0]
    sent = [key for rank in first for key in (*rank["places"], *rank["pixels"])]
    assert not any(rank["places"] or rank["pixels"] or rank["encoded"] for rank in later)
    if not tower_trained:
        assert len(sent) == len(set(sent)) == 5
        forwards = [grids for rank in first for grids in rank["encoded"]]
        assert sum(map(len, forwards)) == 5, "the shared one once"
        for grids in forwards:
            assert len(grids) == 1 or sum(map(math.prod, grids)) <= ROUND_PATCHES
        assert any(len(rank["encoded"]) > 1 for rank in first), "several rounds"
    assert sum(len(rank["pixels"]) for rank in first) == 1, "that the data does not have"
    for rank in found:
        start = rank["data_rank"] * len(rank["shown"])
        shown = alone["shown"][start : start + len(rank["shown"])]
        assert rank["shown"] == shown
    for rank in first:
        start = rank["data_rank"] * len(rank["shown"])
        for features, expected in zip(rank["features"], alone["features"][start:], strict=False):
            torch.testing.assert_close(torch.as_tensor(features), torch.as_tensor(expected))


def test_an_image_that_has_changed_is_named(recipe: Path) -> None:
    config = load(recipe)
    reader = ImageReader(config)
    with pytest.raises(ValueError, match=r"rows.parquet:2: image 2 has other pixels than on rank"):
        reader.read(ImagePlace(2, 1, "image"), "the key of another image")
