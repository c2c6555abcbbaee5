"""Qwen2.5-VL against transformers in fp32: logits at every response token, and every parameter's
gradient.
"""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.demo.tiny_model import make_tiny_model
from tests.distributed.fork import launch
from tests.parity.cases import Differences, Layout, compare
from tests.parity.reference import Sequences

pytestmark = pytest.mark.parity

LAYOUTS = {
    "one rank": Layout(),
    "TP2": Layout(tensor=2),
    "TP2 with sequence parallelism": Layout(tensor=2, sequence=True),
    "DP2": Layout(data=2),
    "TP2 x DP2": Layout(tensor=2, data=2),
}
QUESTION = "Find x in the triangle. How many blue circles?"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windowed and full vision blocks, norms and biases drawn at random, weights large enough to
    matter.
    """
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(
        folder,
        [QUESTION] * 10,
        seed=3,
        num_layers=2,
        vision_depth=3,
        full_attention_blocks=[1],
        tied_embeddings=request.param,
        init_std=0.05,
        randomise_norms_and_biases=True,
    )
    return folder


def picture(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(
        0, 255, (height // 7, width // 7, 3), dtype=np.uint8
    )
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


def sequences(folder: Path) -> list[Sequences]:
    """One picture, several of different sizes (with more than one window a side), text alone; one
    to three responses.
    """
    processor = Processor(folder, min_pixels=None, max_pixels=None)
    pictures = [
        (picture(56, 56, 1),),
        (picture(280, 84, 2), picture(140, 196, 3)),
        (),
        (picture(112, 168, 4),),
    ]
    generator = np.random.default_rng(5)
    cases = []
    for index, images in enumerate(pictures):
        row = Row(
            index, "<image>" * len(images) + QUESTION[: 12 * index + 8], "", images, "", "test"
        )
        responses = [generator.integers(0, 255, 3 + 2 * i).tolist() for i in range(1 + index % 3)]
        cases.append(Sequences(processor.prompt(row), responses))
    return cases


def check(results: list[Differences]) -> None:
    for result in results:
        assert result.logits < 1e-5
        assert result.gradients < 1e-5, result.parameter
        assert result.norm < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_logits_and_gradients(folder: Path, layout: Layout) -> None:
    check(launch(layout.world_size, compare, folder, layout, sequences(folder)))


def test_text_only_batch_trains_with_an_unfrozen_tower(folder: Path) -> None:
    layout = Layout(tensor=2)
    text_only = [sequences(folder)[2]]
    check(launch(layout.world_size, compare, folder, layout, text_only))
