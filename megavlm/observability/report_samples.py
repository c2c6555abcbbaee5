"""Sampled rollouts for the report: a few steps, with their images embedded."""

from collections.abc import Callable, Mapping
from itertools import groupby
from math import log
from pathlib import Path
from typing import Any

from PIL import Image

from megavlm.observability.page import EmbeddedImage, embed
from megavlm.observability.records import Record, read_records
from megavlm.observability.samples import SAMPLES_FILE, SAMPLES_FOLDER
from megavlm.observability.text import shorten

# Bounds of the page's size. LIMITS: characters of texts, and responses of a group.
MAX_STEPS = 24
MAX_IMAGE_BYTES = 12_000_000
# Probabilities below which a token has a class of the style sheet, the lowest first.
STYLES = ((0.2, "p3"), (0.5, "p2"), (0.8, "p1"))
LIMITS = {"prompt": 2000, "response": 1200, "responses": 32}


def sampled_steps(run_dir: Path) -> list[tuple[int, list[Record]]]:
    """Return up to MAX_STEPS steps with their groups. `shown` of a group, and of a response's later
    turns, holds the images, or why one is not shown.
    """
    records = read_records(run_dir / SAMPLES_FOLDER / SAMPLES_FILE)
    steps = [(step, list(groups)) for step, groups in groupby(records, lambda r: r["step"])]
    images = _Images(run_dir / SAMPLES_FOLDER)

    def shown(item: Record) -> Record:
        return item | {"shown": [images.read(name) for name in item["images"]]}

    return [
        (step, [shown(group) | {"responses": _responses(group, shown)} for group in groups])
        for step, groups in _evenly(steps, MAX_STEPS)
    ]


def _responses(group: Record, shown: Callable[[Record], Record]) -> list[Record]:
    """Return the responses that are shown, each with its turns, the first of which has no message
    of its own.
    """
    found = []
    for response in group["responses"][: LIMITS["responses"]]:
        first = {"text": response["text"], "tokens": response.get("tokens", [])}
        turns = [first, *map(shown, response.get("turns", ()))]
        coloured = [turn | {"spans": spans(turn, LIMITS["response"])} for turn in turns]
        found.append({"parts": {}, **response, "turns": coloured})
    return found


def spans(turn: Mapping[str, Any], limit: int) -> list[tuple[str, str]]:
    """Return the text of a turn in (class, text), by the probability of its tokens, as far as they
    were kept; at most `limit` characters. Empty without tokens.
    """
    found: list[tuple[str, str]] = []
    for text, logprob in turn.get("tokens", ()):
        style = next((style for low, style in STYLES if logprob < log(low)), "")
        if found and found[-1][0] == style:
            found[-1] = style, found[-1][1] + text
        else:
            found.append((style, text))
    if not found:
        return []
    known = "".join(text for _, text in found).lstrip()
    if turn["text"].startswith(known):  # as it does if not all tokens were kept
        found.append(("", turn["text"][len(known) :]))
    cut, left = [], limit
    for style, text in found:
        if left > 0 and text:
            cut.append((style, shorten(text, left)))
        left -= len(text)
    return cut


class _Images:
    """Embedded images, until the page has MAX_IMAGE_BYTES of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes_left = MAX_IMAGE_BYTES

    def read(self, name: str) -> EmbeddedImage | str:
        path = self._folder / Path(name).name
        if not path.exists():
            return "image is no longer there"
        with Image.open(path) as image:
            embedded = embed(image)
        if len(embedded.uri) > self._bytes_left:
            return f"left out for size: {name}"
        self._bytes_left -= len(embedded.uri)
        return embedded


def _evenly(items: list[Any], count: int) -> list[Any]:
    """Return at most `count` of the items, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
