"""Self-contained HTML pages: jinja2 templates that share a style sheet, and embedded images.

Pages show model output and untrusted data. The template engine therefore escapes every text, and
the page's content security policy allows only the page's own script (by its hash) and only images
that are embedded in the page.
"""

import base64
import hashlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from megavlm.observability.text import duration, number, percent, points, shorten, visible

MAX_SIDE = 448
# Images up to this side are shown without smoothing: those of a toy data set are a few dozen
# pixels wide.
_SMALL_SIDE = 128

TEMPLATES = Path(__file__).with_name("templates")
_environment = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters |= {
    "shorten": shorten,
    "visible": visible,
    "duration": duration,
    "number": number,
    "percent": percent,
    "points": points,
}


@dataclass(frozen=True)
class EmbeddedImage:
    """Image as a data URI. `is_small`: the browser shows it without smoothing. `width` and
    `height` are in pixels.
    """

    uri: str
    is_small: bool
    width: int
    height: int


def render(template: str, *, title: str, script: str = "", **values: object) -> bytes:
    """Render `template` with `values`, as UTF-8. `script`: name of the page's script."""
    code = (TEMPLATES / script).read_text(encoding="utf-8") if script else ""
    sources = "img-src data:; style-src 'unsafe-inline'"
    if code:
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        sources += f"; script-src 'sha256-{digest}'"
    page = _environment.get_template(template).render(
        title=title,
        policy=f"default-src 'none'; {sources}",
        css=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        script=code,
        **values,
    )
    return page.encode()


def fragment(template: Path, **values: object) -> Markup:
    """Render a template file as HTML for a part of a page. It may import parts.html."""
    text = template.read_text(encoding="utf-8")
    # The environment escapes every value.
    return Markup(_environment.from_string(text).render(**values))  # noqa: S704


def embed(image: Image.Image, side: int = MAX_SIDE, form: str = "JPEG") -> EmbeddedImage:
    """Embed an image in a page, reduced to `side` pixels; small images are lossless. form: Pillow's
    name of the file format of others.
    """
    reduced, buffer = image.convert("RGB"), BytesIO()
    is_small = max(image.size) <= _SMALL_SIDE
    if is_small:
        reduced.save(buffer, format="PNG")
    else:
        reduced.thumbnail((side, side))
        reduced.save(buffer, format=form, quality=85, method=2)  # WebP's: a tenth of the time
    content = base64.b64encode(buffer.getvalue()).decode()
    uri = f"data:image/{'png' if is_small else form.lower()};base64,{content}"
    return EmbeddedImage(uri, is_small, *reduced.size)
