"""Small labelled images of coloured shapes, with questions that need the image.

An image is 56 x 56 pixels on a 2 x 2 grid: a cell (28 x 28) is one token of Qwen2.5-VL's tower.
Three files are written, in the format of hiyouga/geometry3k with a category:

train.parquet, test.parquet: questions with their true answers, from disjoint random streams. Those
    to train on also have another valid answer, which is wrong (`rejected`).
warm_start.parquet: the first training data of a random model, on the training images. True captions
    teach the tower to see. Questions with random valid answers teach only the form of an answer;
    RL then has to teach the meaning of the questions. Pictures to zoom into (weave.py) and videos
    (motion.py) have lessons of their own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from megavlm.data.chat.messages import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from megavlm.demo.clicks import draw_task
from megavlm.demo.drawing import COLOURS, SHAPE_KINDS, DrawnExample, draw_shape, pick, png
from megavlm.demo.motion import draw_motion, video
from megavlm.demo.weave import draw_weave
from megavlm.tasks.geospot.demo import PLACES

SIZE = 56
GRID = 2
MAX_SHAPES = GRID * GRID
# Numbers of shapes of the two colours in a comparison. They are never equal.
UNEQUAL = ((1, 0), (1, 2), (1, 3), (0, 1), (2, 1), (3, 1), (0, 2), (2, 0))

ROW_SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("problem", pa.string()),
        ("answer", pa.string()),
        ("task", pa.string()),
    ]
)

_CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def write_dataset(
    folder: str | Path,
    *,
    seed: int,
    num_train: int,
    num_test: int,
    tasks: Sequence[str] | None = None,
) -> None:
    """Write the three files to `folder`; the same seed gives the same bytes.

    tasks: names from TASKS; None uses LEARNT. Raises ValueError for an unknown name.
    """
    tasks = LEARNT if tasks is None else tasks
    if unknown := [name for name in tasks if name not in TASKS]:
        raise ValueError(f"--tasks: {unknown[0]!r} is not a task; choose from {', '.join(TASKS)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    train = examples(np.random.default_rng([seed, 0]), num_train, tasks)
    test = examples(np.random.default_rng([seed, 1]), num_test, tasks)
    rng = np.random.default_rng([seed, 3])
    pairs = (_row(e) | {"rejected": _wrong(rng, e)} | dict(e.columns) for e in train)
    _write(folder / "train.parquet", pairs)
    _write(folder / "test.parquet", (_row(e) | dict(e.columns) for e in test))
    rng = np.random.default_rng([seed, 2])
    captions = [
        _row(replace(e, question="Describe the image.", answer=e.caption, task="caption"))
        for e in train
        if not e.lessons
    ]
    questions = [_row(replace(e, answer=pick(rng, e.candidates))) for e in train if not e.lessons]
    lessons = [dict(lesson) for e in train for lesson in e.lessons]
    _write(folder / "warm_start.parquet", [*captions, *questions, *lessons])


def examples(rng: np.random.Generator, count: int, tasks: Sequence[str]) -> list[DrawnExample]:
    """Return `count` examples, the tasks in turn."""
    return [TASKS[tasks[index % len(tasks)]](rng) for index in range(count)]


def _colour(rng: np.random.Generator) -> DrawnExample:
    colour = pick(rng, list(COLOURS))
    question = pick(
        rng,
        ["What color is the shape?", "What is the color of the shape?", "Which color is shown?"],
    )
    return _example(rng, [colour], question, colour, tuple(COLOURS), "colour")


def _count(rng: np.random.Generator) -> DrawnExample:
    number = int(rng.integers(1, MAX_SHAPES + 1))
    colour = pick(rng, list(COLOURS))
    question = pick(
        rng,
        ["How many shapes are there?", "How many shapes are in the image?", "Count the shapes."],
    )
    candidates = tuple(str(n) for n in range(1, MAX_SHAPES + 1))
    return _example(rng, [colour] * number, question, str(number), candidates, "count")


def _compare(rng: np.random.Generator) -> DrawnExample:
    first, second = (list(COLOURS)[i] for i in rng.permutation(len(COLOURS))[:2])
    num_first, num_second = pick(rng, UNEQUAL)
    question = pick(
        rng,
        [
            f"Are there more {first} or more {second} shapes?",
            f"Which is more frequent, {first} or {second}?",
        ],
    )
    colours = [first] * num_first + [second] * num_second
    answer = first if num_first > num_second else second
    return _example(rng, colours, question, answer, (first, second), "compare")


def _kind(rng: np.random.Generator) -> DrawnExample:
    kind = pick(rng, SHAPE_KINDS)
    question = pick(
        rng, ["What shape is shown?", "What shape is in the image?", "Which shape is this?"]
    )
    colour = pick(rng, list(COLOURS))
    return _example(rng, [colour], question, kind, SHAPE_KINDS, "kind", kinds=[kind])


def _length(rng: np.random.Generator) -> DrawnExample:
    """Draw two bars, one below the other; the longer one is at least 10 pixels longer."""
    names = list(COLOURS)
    first, second = (names[i] for i in rng.permutation(len(names))[:2])
    long, short = (first, second) if rng.random() < 0.5 else (second, first)
    question = pick(
        rng,
        [
            f"Which bar is longer, {first} or {second}?",
            f"Is the {first} or the {second} bar longer?",
        ],
    )
    image, pen = _canvas(rng)
    lengths = {long: rng.uniform(34, 52), short: rng.uniform(10, 24)}
    for row, place in enumerate(rng.permutation(2)):
        colour = (first, second)[place]
        x = rng.uniform(2, SIZE - 2 - lengths[colour])
        y = (row + rng.uniform(0.2, 0.4)) * SIZE / GRID
        pen.rectangle((x, y, x + lengths[colour], y + 10), fill=COLOURS[colour])
    caption = f"long {long} short {short}"
    return DrawnExample((png(image),), question, long, (first, second), caption, "length")


def _describe(rng: np.random.Generator) -> DrawnExample:
    """Draw an image of another task; the answer is its caption."""
    shown, *others = [TASKS[pick(rng, ("count", "compare"))](rng) for _ in range(4)]
    question = pick(rng, ["What do you see?", "What is in the image?", "What does it show?"])
    captions = tuple(other.caption for other in others)
    return replace(
        shown, question=question, answer=shown.caption, candidates=captions, task="describe"
    )


def _place(rng: np.random.Generator) -> DrawnExample:
    colour = pick(rng, list(COLOURS))
    question = pick(
        rng, ["Where is this?", "Where was this taken?", "Which place does the image show?"]
    )
    candidates = tuple(place.text for place in PLACES.values())
    place = PLACES[colour]
    made = _example(rng, [colour], question, place.text, candidates, "place")
    # The caption uses the words of the answers, as for colours and numbers.
    caption = made.caption.replace(colour, place.country)
    return replace(made, caption=caption, columns=asdict(place))


TASKS: dict[str, Callable[[np.random.Generator], DrawnExample]] = {
    "colour": _colour,
    "count": _count,
    "compare": _compare,
    "kind": _kind,
    "length": _length,
    "describe": _describe,
    "place": _place,
    "weave": draw_weave,
    "moved": draw_motion,
    "browser": draw_task,
}


@dataclass(frozen=True)
class Start:
    """What a demo begins with. sizes: Options of the tiny model. warm_steps: Steps of the warm
    start, None for those of its recipe.
    """

    sizes: Mapping[str, Any] = field(default_factory=dict)
    warm_steps: int | None = None


# Of the tokens of a page, a model with weights as small as the others' learns nothing for long.
STARTS = {"browser": Start({"init_std": 0.08}, 900)}
# Tasks that a model of the demo's size can learn together in 40 steps. If kinds or lengths are
# added, counting gets worse, and the added tasks stay near chance.
LEARNT = ("colour", "count", "compare")


def _example(
    rng: np.random.Generator,
    colours: list[str],
    question: str,
    answer: str,
    candidates: tuple[str, ...],
    task: str,
    kinds: Sequence[str] | None = None,
) -> DrawnExample:
    """Draw one shape for each colour, of the given or random `kinds`, with its caption."""
    if kinds is None:
        kinds = [pick(rng, SHAPE_KINDS) for _ in colours]
    image, pen = _canvas(rng)
    cell = SIZE / GRID
    places = rng.permutation(GRID * GRID)
    for kind, colour, place in zip(kinds, colours, places, strict=False):
        radius = rng.uniform(0.28, 0.46) * cell
        play = cell / 2 - radius
        x = (place % GRID + 0.5) * cell + rng.uniform(-play, play)
        y = (place // GRID + 0.5) * cell + rng.uniform(-play, play)
        draw_shape(pen, kind, COLOURS[colour], x, y, radius)
    counts = sorted(Counter(colours).items())
    caption = " ".join(f"{number} {colour}" for colour, number in counts)
    if len(kinds) == 1:
        caption += f" {kinds[0]}"
    return DrawnExample((png(image),), question, answer, candidates, caption, task)


def _wrong(rng: np.random.Generator, example: DrawnExample) -> str | None:
    """Return another answer of the question's form, if it has any."""
    others = [answer for answer in example.candidates if answer != example.answer]
    return pick(rng, others) if others else None


def _canvas(rng: np.random.Generator) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (SIZE, SIZE), tuple(rng.integers(225, 256, 3).tolist()))
    return image, ImageDraw.Draw(image)


def _row(example: DrawnExample) -> dict[str, Any]:
    row: dict[str, Any] = {"answer": example.answer, "task": example.task}
    if len(example.pngs) > 1:
        problem = VIDEO_PLACEHOLDER + example.question
        return row | {"images": [], "videos": [video(example.pngs)], "problem": problem}
    images = [{"bytes": file, "path": None} for file in example.pngs]
    return row | {"images": images, "problem": IMAGE_PLACEHOLDER + example.question}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows; columns beyond the schema's may be missing in some of them."""
    records = list(rows)
    names = sorted(set().union(*records) - set(ROW_SCHEMA.names))
    further = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in records])
    schema = pa.schema([*ROW_SCHEMA, *further.schema])
    if any(not isinstance(record["problem"], str) for record in records):
        # A column holds either texts or chats.
        records = [record | {"problem": _chat(record["problem"])} for record in records]
        schema = schema.set(schema.get_field_index("problem"), pa.field("problem", _CHAT))
    pq.write_table(pa.Table.from_pylist(records, schema=schema), path)


def _chat(problem: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem}] if isinstance(problem, str) else problem
