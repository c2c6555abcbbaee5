"""Pictures with details that only a crop shows: four grey patches are woven from a colour and its
opposite.

A picture has 224 x 224 pixels, and the demo's recipe shows it to the model at 56 x 56 (64 x 64 for
Qwen3-VL and 3.5). There a pixel covers about 4 x 4, over which a checkerboard of 2 x 2 pixels a
square has the same mean, whatever its colour.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from megavlm.demo.drawing import COLOURS, DrawnExample, pick
from megavlm.tasks.zoom.pictures import crop, fitted

SIDE, PATCH = 224, 64  # pixels
WOVEN = ("red", "green", "blue", "black")
# Boxes in the middle of the patches, as the policy writes them: 0 to 1000 across and down.
PLACES = {
    f"{row} {column}": (x, y, x + 100, y + 100)
    for row, y in (("top", 200), ("bottom", 700))
    for column, x in (("left", 200), ("right", 700))
}
SHOWN = 56  # pixels of a side of a crop, to which recipes/debug/zoom_shapes.yaml enlarges it


def draw_weave(rng: np.random.Generator) -> DrawnExample:
    """Draw a picture, with the lessons of its warm start."""
    picture = Image.new("RGB", (SIDE, SIDE), tuple(rng.integers(225, 256, 3).tolist()))
    colours = {name: pick(rng, WOVEN) for name in PLACES}
    for name, box in PLACES.items():
        # Squares of the checkerboard lie within the pixels that the model sees.
        x, y = ((box[axis] + 50) * SIDE // 4000 * 4 - PATCH // 2 for axis in (0, 1))
        picture.paste(_woven(colours[name]), (x, y))
    place, tried = pick(rng, list(PLACES)), pick(rng, list(PLACES))
    question = pick(
        rng,
        [
            f"What color is in the {place} patch?",
            f"Which color is woven into the {place} patch?",
            f"What is the color of the {place} patch?",
        ],
    )
    file, looked = _png(picture), _crop(picture, PLACES[tried])
    lessons = _lessons(rng, question, place, file, tried, looked, colours[tried])
    return DrawnExample(
        (file,), question, colours[place], WOVEN, "", "weave", lessons=tuple(lessons)
    )


def call(place: str) -> str:
    """Return the tool call for the patch at a place."""
    box = list(PLACES[place])
    return f'<tool_call>\n{{"name": "zoom", "arguments": {{"box": {box}}}}}\n</tool_call>'


def _lessons(
    rng: np.random.Generator,
    question: str,
    place: str,
    picture: bytes,
    tried: str,
    looked: bytes,
    colour: str,
) -> Iterator[Mapping[str, Any]]:
    """Yield the lessons of the warm start. They teach the model to see a crop and answer from it,
    to give the box of a place, and to write an answer and a call in their form. One response in
    five calls, and every other call is at a random place, so that RL has to teach when to call, and
    with which box.

    place: The place that the question names. tried, looked, colour: Another place, its crop and its
    colour.
    """
    asked = _said("user", f"<image>{question}")
    turns = [asked, _said("assistant", call(tried)), _said("tool", "Image 2:<image>")]
    where = [_said("user", f"<image>Where is the {place} patch?")]
    called = call(pick(rng, [place, pick(rng, list(PLACES))]))
    for problem, images, answer in (
        ([_said("user", "<image>Describe the image.")], [looked], f"{colour} patch"),
        ([asked], [picture], pick(rng, WOVEN)),
        ([asked], [picture], called if rng.random() < 0.4 else pick(rng, WOVEN)),
        (where, [picture], str(list(PLACES[place]))),
        (turns, [picture, looked], colour),
    ):
        files = [{"bytes": image, "path": None} for image in images]
        yield {"images": files, "problem": problem, "answer": answer, "task": "lesson"}


@cache
def _woven(colour: str) -> Image.Image:
    opposite = [255 - value for value in COLOURS[colour]]
    is_opposite = (np.indices((PATCH, PATCH)) // 2).sum(0) % 2 == 1
    pixels = np.where(is_opposite[..., None], opposite, COLOURS[colour])
    return Image.fromarray(pixels.astype(np.uint8))


def _crop(picture: Image.Image, box: Sequence[int]) -> bytes:
    return _png(fitted(crop(picture, [value / 1000 for value in box]), SHOWN, 1, 1))


def _png(picture: Image.Image) -> bytes:
    file = BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
