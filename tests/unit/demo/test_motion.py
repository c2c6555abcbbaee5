"""One shape of a drawn video moves, which no frame shows alone."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megavlm.config.load import load
from megavlm.data.media.image_decoding import decode
from megavlm.data.media.video_sources import Video
from megavlm.data.processor import Processor
from megavlm.demo.drawing import COLOURS, DrawnExample
from megavlm.demo.motion import CELL, draw_motion
from megavlm.demo.pipeline import RECIPES
from megavlm.demo.shapes import write_dataset
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from tests.conftest import read_rows


@pytest.fixture(scope="module")
def drawn() -> list[DrawnExample]:
    rng = np.random.default_rng(0)
    return [draw_motion(rng) for _ in range(200)]


def cell_of(png: bytes, colour: str) -> tuple[int, int]:
    """Return the cell that holds all pixels of a colour."""
    places = (np.asarray(decode(png)) == COLOURS[colour]).all(-1).nonzero()
    (x, y) = ({int(place) // CELL for place in axis} for axis in places)
    assert len(x) == len(y) == 1
    return x.pop(), y.pop()


def colours_that_moved(frames: tuple[bytes, ...]) -> dict[str, bool]:
    """Return whether a colour is in another cell in the second frame, by the colours shown."""
    first, second = frames
    pixels = np.asarray(decode(first))
    shown = [name for name, colour in COLOURS.items() if (pixels == colour).all(-1).any()]
    cells = {name: (cell_of(first, name), cell_of(second, name)) for name in shown}
    assert len({begins for begins, _ in cells.values()}) == len(shown)
    assert len({ends for _, ends in cells.values()}) == len(shown)
    return {name: begins != ends for name, (begins, ends) in cells.items()}


def told(moved: dict[str, bool]) -> str:
    """Return the caption of a video: the shape that moves comes first."""
    names = sorted(moved, key=lambda name: (not moved[name], name))
    return " ".join(f"{name} {'moved' if moved[name] else 'stayed'}" for name in names)


def test_the_answer_is_the_one_of_three_shapes_that_moves(drawn: list[DrawnExample]) -> None:
    for example in drawn:
        moved = colours_that_moved(example.pngs)
        assert set(moved) == set(example.candidates) and len(moved) == 3
        assert [name for name in moved if moved[name]] == [example.answer]
    answers = Counter(example.answer for example in drawn)
    assert set(answers) == set(COLOURS) and max(answers.values()) < 50


def test_lessons_say_what_their_videos_show_and_withhold_answers(
    drawn: list[DrawnExample],
) -> None:
    right = 0
    for example in drawn:
        alone, caption, question = example.lessons
        frames = [tuple(lesson["videos"][0]["frames"]) for lesson in example.lessons]
        moved = colours_that_moved(frames[0])
        assert len(moved) == 1 and alone["answer"] == told(moved)
        assert frames[1:] == [example.pngs] * 2
        assert caption["answer"] == told(colours_that_moved(example.pngs))
        assert question["problem"] == f"<video>{example.question}"
        right += question["answer"] == example.answer
    assert 45 < right < 90


def test_no_frame_tells_alone(drawn: list[DrawnExample]) -> None:
    """The shape that moves is in each cell as often as the others."""
    for frame in (0, 1):
        cells = Counter(cell_of(example.pngs[frame], example.answer) for example in drawn)
        assert len(cells) == 4 and max(cells.values()) < 75


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_prompt_has_one_token_for_a_cell_in_both_frames(tmp_path: Path, family: str) -> None:
    write_dataset(tmp_path, seed=0, num_train=2, num_test=1, tasks=["moved"])
    recipe = load(RECIPES / "moved_shapes.yaml")
    (row,) = read_rows([str(tmp_path / "test.parquet")], video_key=recipe.data.video_key)
    (video,) = row.videos
    assert isinstance(video, Video) and len(video.frames) == 2 and not row.images
    model = tmp_path / "model"
    make_tiny_model(model, [row.problem, row.answer], seed=0, family=family)
    prompt = Processor(model, recipe.data, family_of(model)).prompt(row)
    assert [image.num_patches for image in prompt.images] == [4 * 4]  # four patches a token
    assert len(prompt.token_ids) <= recipe.data.max_prompt_tokens
