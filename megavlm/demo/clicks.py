"""Small tasks on a page (board.html) in a real browser: click a colour, enter a digit, choose from
a row. The last two end by a click on OK.

The page has 84 x 84 pixels. A cell of its picture (28 x 28) is one token of Qwen2.5-VL's tower.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from megavlm.config.environment import EnvironmentConfig
from megavlm.demo.drawing import COLOURS, SHAPE_KINDS, DrawnExample, draw_shape, pick, png
from megavlm.environments.base import Context, Observation
from megavlm.environments.base import Image as Shown
from megavlm.environments.processes import make_environments
from megavlm.rewards.base import Example, Score

CELL, COLUMNS, ROWS = 28, 3, 2  # pixels of a cell's side, and cells of the picture
# A column of the picture has a tint, and a row a brightness, because so small a model does not
# learn within minutes where a token of an image lies.
TINTS = ((255, 170, 170), (170, 255, 170), (170, 170, 255))
BRIGHTNESS = (1.0, 0.6)
NUM_SHAPES = 3
SECOND = 0.5  # of the examples with two turns have a lesson of the second one, which is easy
DIGITS = "0123456789"
# Places of the button and of the field, as the policy writes them: 0 to 1000 across and down.
OK, FIELD = (833, 833), (333, 833)
ENVIRONMENT = "megavlm.demo.board:Board"
_FONT = ImageFont.load_default(48)


def draw_task(rng: np.random.Generator) -> DrawnExample:
    """Draw a task, with the lessons of its warm start."""
    return pick(rng, [_click, _digit, _row])(rng)


def call(action: str, **arguments: Any) -> str:
    """Return a call of the tool `computer`."""
    made = json.dumps({"name": "computer", "arguments": {"action": action, **arguments}})
    return f"<tool_call>\n{made}\n</tool_call>"


def click(place: Sequence[int]) -> str:
    return call("click", coordinate=list(place))


def place_of(cell: int) -> tuple[int, int]:
    """Return the middle of a cell (0 to 5) of the picture, as the policy writes it."""
    return (167, 500, 833)[cell % COLUMNS], (167, 500)[cell // COLUMNS]


def screen(picture: bytes, text: str = "") -> bytes:
    """Return the page's screenshot with a picture and a digit or nothing in the field."""
    whole = Image.open(BytesIO(_screens()[text])).convert("RGB")
    whole.paste(Image.open(BytesIO(picture)), (0, 0))
    return png(whole)


def _click(rng: np.random.Generator) -> DrawnExample:
    """Draw shapes, one of which is to be clicked. No other has its kind or colour."""
    cells = rng.permutation(COLUMNS * ROWS)[:NUM_SHAPES].tolist()
    picture, shapes = _shapes(rng, cells)
    kind = shapes[0][1]
    questions = {f"Click the {kind}.": _look_and_click(kind, cells[0])}
    questions |= _by_colour("Click the {} shape.", shapes, cells)
    question = pick(rng, list(questions)[:2])
    calls = [questions[question]]
    caption, cell = _caption(shapes, cells), str(cells[0] + 1)
    return _example(rng, picture, question, cell, "click", caption, calls, "", questions)


def _row(rng: np.random.Generator) -> DrawnExample:
    """Draw shapes in a row, one of which is to be chosen."""
    cells = (rng.permutation(COLUMNS) + COLUMNS * rng.integers(ROWS)).tolist()
    picture, shapes = _shapes(rng, cells)
    column = str(cells[0] % COLUMNS + 1)
    questions = _by_colour("Choose {} and press OK.", shapes, cells)
    question = next(iter(questions))
    calls = [questions[question], click(OK)]
    caption = _caption(shapes, cells)
    return _example(rng, picture, question, column, "row", caption, calls, column, questions)


def _digit(rng: np.random.Generator) -> DrawnExample:
    """Draw a digit, which is to be entered."""
    picture, digit = _paper().copy(), pick(rng, DIGITS)
    x, y = np.array(picture.size) / 2 + rng.uniform(-2, 2, 2)
    ImageDraw.Draw(picture).text((x, y), digit, "black", _FONT, anchor="mm")
    question, calls = "Enter the digit and press OK.", [call("type", text=digit), click(OK)]
    return _example(rng, picture, question, digit, "digit", digit, calls, digit)


def _shapes(
    rng: np.random.Generator, cells: Sequence[int]
) -> tuple[Image.Image, list[tuple[str, str]]]:
    """Draw a shape in each of the cells. Return the picture, and the shapes' colours and kinds. The
    kind of the first one is no other's.
    """
    picture = _paper().copy()
    colours = [list(COLOURS)[i] for i in rng.permutation(len(COLOURS))[: len(cells)]]
    first = pick(rng, SHAPE_KINDS)
    others = [kind for kind in SHAPE_KINDS if kind != first]
    shapes = [(colours[0], first), *((colour, pick(rng, others)) for colour in colours[1:])]
    for cell, (colour, kind) in zip(cells, shapes, strict=True):
        radius = rng.uniform(8, 10)
        x, y = (np.array([cell % COLUMNS, cell // COLUMNS]) + 0.5) * CELL + rng.uniform(-1, 1, 2)
        draw_shape(ImageDraw.Draw(picture), kind, COLOURS[colour], x, y, radius)
    return picture, shapes


def _by_colour(
    question: str, shapes: Sequence[tuple[str, str]], cells: Sequence[int]
) -> dict[str, str]:
    """Return a question about the colour of each shape, with its solution."""
    return {
        question.format(colour): _look_and_click(f"{colour} {kind}", cell)
        for (colour, kind), cell in zip(shapes, cells, strict=True)
    }


def _look_and_click(shape: str, cell: int) -> str:
    """Return a response that says what is where, as captions do, and then clicks there. Without it
    the model clicks any of the shapes, because the question is too far from the coordinates.
    """
    x, y = place_of(cell)
    return f"{shape} {x} {y}\n{click((x, y))}"


def _caption(shapes: Sequence[tuple[str, str]], cells: Sequence[int]) -> str:
    """Return shapes with their places, in the order of COLOURS. In the order of places it would
    take the model longer to see.
    """
    placed = dict(zip(shapes, map(place_of, cells), strict=True))
    ordered = sorted(placed, key=lambda shape: list(COLOURS).index(shape[0]))
    return " ".join(f"{' '.join(shape)} {placed[shape][0]} {placed[shape][1]}" for shape in ordered)


def _example(
    rng: np.random.Generator,
    picture: Image.Image,
    question: str,
    answer: str,
    task: str,
    caption: str,
    calls: Sequence[str],
    entered: str = "",
    questions: Mapping[str, str] = MappingProxyType({}),
) -> DrawnExample:
    """Return an example with its lessons: what is where, and scripted episodes. A second turn of
    theirs clicks on OK or on the field at random: which of them ends a task is left to the reward.

    calls: The solution. entered: What the field shows after its first call. questions:
    Questions about the picture, with the responses to them. A model that sees one
    picture with several questions learns sooner to tell them apart.
    """
    file = png(picture)
    shown, tried = screen(file), _said("user", f"{question}\n\n<image>")
    lessons = [
        _lesson([_said("user", "Describe the page.\n\n<image>")], [shown], caption),
        _lesson([tried], [shown], calls[0]),
    ]
    if entered and rng.random() < SECOND:
        turns = [tried, _said("assistant", calls[0]), _said("tool", "<image>")]
        second = pick(rng, [calls[1], click(FIELD)])
        lessons.append(_lesson(turns, [shown, screen(file, entered)], second))
    lessons += [
        _lesson([_said("user", f"{asked}\n\n<image>")], [shown], response)
        for asked, response in questions.items()
        if asked != question
    ]
    return DrawnExample((file,), question, answer, (answer,), "", task, lessons=tuple(lessons))


def _lesson(
    problem: Sequence[Mapping[str, str]], images: Sequence[bytes], answer: str
) -> Mapping[str, Any]:
    files = [{"bytes": image, "path": None} for image in images]
    return {"images": files, "problem": list(problem), "answer": answer, "task": "lesson"}


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@cache
def _paper() -> Image.Image:
    """Return the paper of pictures, whose cells have the colours of their places."""
    paper = Image.new("RGB", (COLUMNS * CELL, ROWS * CELL))
    for row, brightness in enumerate(BRIGHTNESS):
        for column, tint in enumerate(TINTS):
            x, y = column * CELL, row * CELL
            shade = tuple(int(brightness * part) for part in tint)
            paper.paste(shade, (x, y, x + CELL, y + CELL))
    return paper


@cache
def _screens() -> Mapping[str, bytes]:
    """Return screenshots of the page in a real browser, by the digit in its field, "" for none."""
    return asyncio.run(_look())


async def _look() -> Mapping[str, bytes]:
    async def score(text: str, row: Example) -> Score:
        raise AssertionError("the page scores")

    turns = 2 * len(DIGITS) + 1
    pool = await make_environments(
        EnvironmentConfig(name=ENVIRONMENT, workers=1, max_turns=turns, memory_mb=3072)
    )
    try:
        session = await pool.make(Context(score, turns))
        blank = Image.new("RGB", (COLUMNS * CELL, ROWS * CELL))
        shown = {"": _seen(await session.reset(Example("", "", "digit", (png(blank),)), 0))}
        for digit in DIGITS:
            step = await session.step(call("type", text=digit))
            assert step.observation is not None
            shown[digit] = _seen(step.observation)
            await session.step(call("key", text="Backspace"))
        return shown
    finally:
        await pool.close()


def _seen(observation: Observation) -> bytes:
    image = observation.messages[-1]["content"][-1]
    assert isinstance(image, Shown)
    return image.data
