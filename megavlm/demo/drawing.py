"""The form of the examples that the demo draws, and their shapes and colours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 20, 20),
    "green": (20, 180, 40),
    "blue": (30, 60, 230),
    "yellow": (235, 215, 20),
    "black": (10, 10, 10),
    "purple": (150, 30, 180),
}
SHAPE_KINDS = ("circle", "square", "triangle")

T = TypeVar("T")


@dataclass(frozen=True)
class DrawnExample:
    """A question about an image, or about a video if `pngs` are several, its frames. `candidates`:
    all or some of the answers that its form allows. `columns`: other columns of its row.
    `lessons`: rows of the warm start, in place of the caption and the question with a random
    answer.
    """

    pngs: tuple[bytes, ...]
    question: str
    answer: str
    candidates: tuple[str, ...]
    caption: str
    task: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    lessons: Sequence[Mapping[str, Any]] = ()


def pick(rng: np.random.Generator, items: Sequence[T]) -> T:
    return items[int(rng.integers(len(items)))]


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def draw_shape(
    pen: ImageDraw.ImageDraw,
    kind: str,
    colour: tuple[int, int, int],
    x: float,
    y: float,
    radius: float,
) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if kind == "circle":
        pen.ellipse(box, fill=colour)
    elif kind == "square":
        pen.rectangle(box, fill=colour)
    else:
        corners = [(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)]
        pen.polygon(corners, fill=colour)
