"""The rollouts of the report: a selector over steps, and each sampled group with its images."""

import base64
from html import escape
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image

from megavlm.observability.records import Record, read_records
from megavlm.observability.samples import FILE, FOLDER
from megavlm.observability.text import number

# What bounds the size of the page.
MAX_STEPS = 24
MAX_SIDE = 448
MAX_PROMPT_CHARS = 2000
MAX_RESPONSE_CHARS = 1200
MAX_RESPONSES = 32
MAX_IMAGE_BYTES = 12_000_000
# Shown without smoothing: the images of a toy set are a few dozen pixels wide.
_SMALL_SIDE = 128


def samples_section(run_dir: Path) -> str:
    """The section's HTML, "" if the run sampled nothing."""
    records = read_records(run_dir / FOLDER / FILE)
    steps = [(step, list(groups)) for step, groups in groupby(records, lambda r: r["step"])]
    steps = _evenly(steps, MAX_STEPS)
    if not steps:
        return ""
    images = _Images(run_dir / FOLDER)
    sections = []
    for step, groups in steps:
        body = "".join(_group(group, images) for group in groups)
        sections.append(f'<section data-step="{step}"><h3>Step {step}</h3>{body}</section>')
    options = "".join(f"<option>Step {step}</option>" for step, _ in steps)
    return (
        "<h2>Sampled rollouts</h2>"
        '<div class="picker" hidden><button type="button" class="back">Back</button>'
        f'<select aria-label="Step">{options}</select>'
        '<button type="button" class="next">Next</button>'
        '<span class="soft">green: correct; the number is the reward</span></div>'
        + "".join(sections)
    )


def _group(group: Record, images: "_Images") -> str:
    shown = "".join(images.tag(name) for name in group["images"])
    facts = [f"answer {group['answer']}", group["category"], group["source"]]
    responses = group["responses"][:MAX_RESPONSES]
    longest = max((len(response["text"]) for response in responses), default=0)
    return (
        f'<article class="card group"><div class="images">{shown}</div><div>'
        f'<div class="prompt">{_text(group["prompt"], MAX_PROMPT_CHARS)}</div>'
        f'<div class="facts">{" · ".join(_text(fact, 200) for fact in facts if fact)}</div>'
        f'<div class="responses{" long" if longest > 40 else ""}">'
        f"{''.join(map(_response, responses))}</div></div></article>"
    )


def _response(response: dict[str, Any]) -> str:
    style = "response correct" if response["correct"] else "response"
    text = _text(response["text"], MAX_RESPONSE_CHARS) or '<em class="soft">empty</em>'
    if response["finish"] != "stop":
        text += f' <em class="soft">({escape(response["finish"])})</em>'
    return f'<div class="{style}"><span>{text}</span><b>{number(response["reward"])}</b></div>'


def _text(text: str, limit: int) -> str:
    cut = (
        text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit} more characters]"
    )
    return escape(cut)


class _Images:
    """Images as data URIs, until the page has enough of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes_left = MAX_IMAGE_BYTES

    def tag(self, name: str) -> str:
        path = self._folder / Path(name).name
        if not path.exists():
            return '<span class="soft">image is no longer there</span>'
        uri, side = _data_uri(path)
        if len(uri) > self._bytes_left:
            return f'<span class="soft">left out for size: {escape(name)}</span>'
        self._bytes_left -= len(uri)
        style = ' class="small"' if side <= _SMALL_SIDE else ""
        return f'<img{style} alt="image of the prompt" src="{uri}">'


def _data_uri(path: Path) -> tuple[str, int]:
    """The image, reduced to MAX_SIDE if it is larger, and its longer side in pixels."""
    with Image.open(path) as image:
        side = max(image.size)
        if side <= MAX_SIDE:
            return _uri("png", path.read_bytes()), side
        reduced = image.convert("RGB")
    reduced.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = BytesIO()
    reduced.save(buffer, format="JPEG", quality=85)
    return _uri("jpeg", buffer.getvalue()), side


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _evenly(items: list[Any], count: int) -> list[Any]:
    """At most `count` of the items, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
