"""Pictures of the zoom tools: boxes as shares of an image, crops, and sizes in whole tokens."""

from collections.abc import Sequence

from PIL import Image, ImageDraw

RATIO = 100  # longest side over the shortest: models refuse more than 200
RED = (255, 0, 0)


def shares(place: Sequence[float], span: tuple[float, float]) -> list[float]:
    """Return a point or a box as shares of an image's width and height. span: Coordinates of the
    image's right and bottom edge.
    """
    return [value / span[axis % 2] for axis, value in enumerate(place)]


def within(box: Sequence[float]) -> list[float]:
    """Cut a box of shares off at the image's edges. Raises ValueError if nothing is left."""
    left, top, right, bottom = box
    if left >= right or top >= bottom:
        raise ValueError("is empty: left must be below right, and top below bottom")
    cut = [min(max(value, 0.0), 1.0) for value in box]
    if cut[0] == cut[2] or cut[1] == cut[3]:
        raise ValueError("is outside of the image")
    return cut


def crop(picture: Image.Image, box: Sequence[float]) -> Image.Image:
    """Return the pixels that a box of shares touches."""
    width, height = picture.size
    left, top, right, bottom = box
    return picture.crop(
        (int(left * width), int(top * height), _up(right * width), _up(bottom * height))
    )


def fitted(picture: Image.Image, side: int, least: int, most: int) -> Image.Image:
    """Resize a picture to whole tokens: enlarge it to about `least`, or shrink it to at most `most`
    tokens. side: Side of a token in pixels. Raises ValueError for one that is too narrow.
    """
    width, height = picture.size
    if max(width, height) > RATIO * min(width, height):
        raise ValueError(
            f"it would be {width} x {height} pixels, too narrow to be seen: take a wider box"
        )
    tokens = width * height / side**2
    scale = (min(max(tokens, least), most) / tokens) ** 0.5
    across, down = (max(round(scale * length / side), 1) for length in picture.size)
    while across * down > most and (across, down) != (1, 1):
        across, down = (across - 1, down) if across > down else (across, down - 1)
    size = across * side, down * side
    return picture if size == picture.size else picture.resize(size, Image.Resampling.LANCZOS)


def rotated(picture: Image.Image, degrees: int) -> Image.Image:
    """Turn a picture clockwise; corners that it did not have are white."""
    return picture.rotate(-degrees, Image.Resampling.BICUBIC, expand=True, fillcolor="white")


def marked(picture: Image.Image, place: Sequence[float]) -> Image.Image:
    """Draw a box, or a circle around a point, given as shares."""
    picture, (width, height) = picture.copy(), picture.size
    line = max(round(min(width, height) / 150), 2)
    pixels = [value * (width, height)[axis % 2] for axis, value in enumerate(place)]
    pen = ImageDraw.Draw(picture)
    if len(pixels) == 2:
        pen.circle(pixels, 4 * line, outline=RED, width=line)
    else:
        pen.rectangle(pixels, outline=RED, width=line)
    return picture


def _up(value: float) -> int:
    return -int(-value // 1)
