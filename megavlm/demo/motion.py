"""Videos of two frames in which one of three shapes moves: which one, no single frame tells.

The frames are 56 x 56 pixels on a 2 x 2 grid. A cell (28 x 28) is one token of Qwen2.5-VL's tower,
and both frames are in it: the tower joins each pair of frames before its first block.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from megavlm.data.chat.messages import VIDEO_PLACEHOLDER
from megavlm.demo.drawing import COLOURS, SHAPE_KINDS, DrawnExample, draw_shape, pick, png

CELL, GRID = 28, 2  # pixels of a cell's side, cells of a frame's
NUM_SHAPES = 3
FPS = 2.0


def draw_motion(rng: np.random.Generator) -> DrawnExample:
    """Draw a video, with the lessons of its warm start."""
    moves, *stay = (list(COLOURS)[i] for i in rng.permutation(len(COLOURS))[:NUM_SHAPES])
    question = pick(rng, ["What moved?", "Which shape moved?", "Which one moved?"])
    frames = _frames(rng, [moves], stay)
    caption = " ".join([f"{moves} moved", *(f"{colour} stayed" for colour in sorted(stay))])
    lessons = tuple(_lessons(rng, question, frames, caption, (moves, *stay)))
    return DrawnExample(frames, question, moves, (moves, *stay), caption, "moved", lessons=lessons)


def video(frames: Sequence[bytes]) -> dict[str, Any]:
    """Return the cell of a column of videos."""
    return {"frames": list(frames), "fps": FPS}


def _lessons(
    rng: np.random.Generator,
    question: str,
    frames: tuple[bytes, ...],
    caption: str,
    colours: Sequence[str],
) -> Iterator[Mapping[str, Any]]:
    """Yield what the warm start teaches: captions of a video with one shape, and of this one, teach
    to see what moves. The question with a random answer teaches only the form of an answer; RL
    then has to teach that it asks for the shape that moves.
    """
    colour, moves = pick(rng, list(COLOURS)), rng.random() < 0.5
    alone = _frames(rng, [colour] * moves, [colour] * (not moves))
    for shown, problem, answer in (
        (alone, "Describe the video.", f"{colour} {'moved' if moves else 'stayed'}"),
        (frames, "Describe the video.", caption),
        (frames, question, pick(rng, colours)),
    ):
        yield {
            "images": [],
            "videos": [video(shown)],
            "problem": VIDEO_PLACEHOLDER + problem,
            "answer": answer,
            "task": "lesson",
        }


def _frames(
    rng: np.random.Generator, moves: Sequence[str], stay: Sequence[str]
) -> tuple[bytes, ...]:
    """Draw a video of shapes with these colours, in cells of their own. A shape that moves is in a
    free cell in the second frame.
    """
    paper = tuple(rng.integers(225, 256, 3).tolist())
    frames = [Image.new("RGB", (GRID * CELL, GRID * CELL), paper) for _ in range(2)]
    cells = iter(rng.permutation(GRID * GRID))
    for colour in (*moves, *stay):
        kind, radius = pick(rng, SHAPE_KINDS), rng.uniform(9, 11)
        within = CELL / 2 + rng.uniform(-2, 2, 2)
        begins = next(cells)
        ends = next(cells) if colour in moves else begins
        for frame, cell in zip(frames, (begins, ends), strict=True):
            x, y = np.array([cell % GRID, cell // GRID]) * CELL + within
            draw_shape(ImageDraw.Draw(frame), kind, COLOURS[colour], x, y, radius)
    return tuple(map(png, frames))
