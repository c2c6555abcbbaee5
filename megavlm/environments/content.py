"""Values of tools and environments as a policy sees them: texts and images."""

import json
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image as Picture
from PIL import UnidentifiedImageError
from pydantic_core import to_jsonable_python

from megavlm.config.data import IMAGE_FORMATS
from megavlm.environments.base import Content, Image

_SIDE = 32  # pixels: an array with a shorter side is data, such as a board


def content_of(value: Any) -> Content:
    """Return a value as content: text as it is, pictures as images, a list with pictures as its
    parts, and anything else as JSON.

    Raises ValueError for a value that is neither a picture nor has a form in JSON.
    """
    is_list = isinstance(value, list | tuple) and any(map(is_picture, value))
    found = [part for one in (value if is_list else [value]) for part in parts_of(one)]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else found


def parts_of(value: Any) -> list[str | Image]:
    """Return the pictures of a value, and the rest as text, in which they have numbers. Raises
    ValueError as `content_of` does.
    """
    if is_picture(value):
        return [_image(value)]
    images = list[str | Image]()
    plain = _plain(value, images)
    return [*images, plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)]


def is_picture(value: Any) -> bool:
    """Return True for an Image, a picture of Pillow, the bytes of an image file, and an array of
    uint8, [H, W] or [H, W, 3], with sides from 32 pixels on.
    """
    if isinstance(value, bytes):
        try:
            Picture.open(BytesIO(value), formats=IMAGE_FORMATS).close()
        except (OSError, ValueError, SyntaxError, UnidentifiedImageError):
            return False
        return True
    return isinstance(value, Image | Picture.Image) or (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3)))
        and min(value.shape[:2]) >= _SIDE
    )


def _image(picture: Any) -> Image:
    if isinstance(picture, Image):
        return picture
    if isinstance(picture, bytes):
        return Image(picture)
    return Image.of(picture.squeeze() if isinstance(picture, np.ndarray) else picture)


def _plain(value: Any, images: list[str | Image]) -> Any:
    """Return a value for JSON, and move its pictures to `images`."""
    if is_picture(value):
        images.append(_image(value))
        return f"image {len(images)}"
    if isinstance(value, Mapping):
        return {str(name): _plain(part, images) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, images) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return to_jsonable_python(value)
