"""One self-contained HTML page for a browser without a network, and the parts that pages share.

A model's words and a stranger's data end up in it, so every text is escaped, and the page's content
security policy lets no script run but its own (named by its hash) and loads nothing but images
that are part of it.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO

from PIL import Image

from megavlm.observability.report_style import CSS

MAX_SIDE = 448
# Shown without smoothing: the images of a toy set are a few dozen pixels wide.
_SMALL_SIDE = 128


def page(title: str, body: str, *, script: str = "") -> str:
    """`body`: HTML whose texts are escaped already."""
    sources = "img-src data:; style-src 'unsafe-inline'"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        sources += f"; script-src 'sha256-{digest}'"
    policy = f"default-src 'none'; {sources}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>megavlm: {escape(title)}</title><style>{CSS}</style></head>"
        f"<body><main>{body}<footer>Written by megavlm. The page loads nothing.</footer>"
        f"</main>{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, raw: Sequence[int] = ()) -> str:
    """A table on a card. Cells are escaped, but those of the columns `raw`, which are HTML."""
    lines = "".join(
        "<tr>"
        + "".join(
            f"<td>{cell if i in raw else escape(str(cell))}</td>" for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="card wide"><table><tr>{heads}</tr>{lines}</table></div>'


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """(value, label) as cards side by side."""
    cards = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in values
    )
    return f'<div class="tiles">{cards}</div>'


def text(value: str, limit: int = 2000) -> str:
    """Escaped; what is beyond `limit` characters is left out, and said to be."""
    if len(value) > limit:
        value = f"{value[:limit]} [... {len(value) - limit} more characters]"
    return escape(value)


def image(opened: Image.Image) -> str:
    """An <img> that holds the image, reduced to MAX_SIDE."""
    side, reduced, buffer = max(opened.size), opened.convert("RGB"), BytesIO()
    if side <= _SMALL_SIDE:
        reduced.save(buffer, format="PNG")
        uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        return f'<img class="small" alt="image of the prompt" src="{uri}">'
    reduced.thumbnail((MAX_SIDE, MAX_SIDE))
    reduced.save(buffer, format="JPEG", quality=85)
    uri = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="image of the prompt" src="{uri}">'
