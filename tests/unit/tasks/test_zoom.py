"""The zoom tools: what a call shows of an image, and what it says where it cannot."""

import asyncio
import hashlib
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image as Picture
from PIL import ImageDraw

from megavlm.data.media.image_decoding import decode
from megavlm.environments.base import ChatFormat, Context, Image
from megavlm.environments.tools.tool import tool
from megavlm.rewards.base import Example, Score
from megavlm.tasks.zoom.environment import Zoom
from tests.support.samples import encode

SIDE = 28
NOISE = Picture.fromarray(np.random.default_rng(0).integers(0, 255, (420, 560, 3), np.uint8))


async def right(text: str, row: Example) -> Score:
    return Score(1.0, True)


class Played:
    """An episode whose model sees images at a share of their size."""

    def __init__(
        self,
        *images: bytes,
        share: float = 1.0,
        chat: ChatFormat | None = None,
        room: int = 10_000,
        cls: type[Zoom] = Zoom,
        **options: Any,
    ) -> None:
        chat = chat or ChatFormat(token_side=SIDE)
        self.context = Context(right, 99, chat, max_observation_tokens=room + 32)
        self.environment, self.share = cls(self.context, **{"min_tokens": 1, **options}), share
        self.start = asyncio.run(self.environment.reset(Example("?", "3", "", images), 0))
        self.see(*images)

    def see(self, *images: bytes) -> None:
        for image in images:
            size = tuple(round(self.share * side) for side in decode(image).size)
            self.context.shown_sizes[hashlib.sha256(image).hexdigest()] = size

    def calls(self, *calls: tuple[str, dict[str, Any]], shown: bool = True) -> list[Any]:
        """Return the content of the results. shown: False if the observation is refused."""
        said = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        text = "".join(f"<tool_call>\n{call}\n</tool_call>" for call in said)
        step = asyncio.run(self.environment.step(text))
        assert step.observation is not None
        contents = [message["content"] for message in step.observation.messages]
        images = [part.data for found in contents for part in found if isinstance(part, Image)]
        self.see(*images if shown else ())
        return contents

    def seen(self, name: str, **arguments: Any) -> Picture.Image:
        """Return the picture that a call shows."""
        ((label, image),) = self.calls((name, arguments))
        assert label.startswith("Image ")
        return decode(image.data)

    def error(self, name: str, **arguments: Any) -> str:
        (text,) = self.calls((name, arguments))
        assert isinstance(text, str) and text.startswith("error: ")
        return text.removeprefix("error: ")


def pixels(picture: Picture.Image) -> Any:
    return np.asarray(picture)


BOX = (140, 28, 364, 196)  # of NOISE, in whole tokens


@pytest.mark.parametrize(
    ("share", "coordinates", "box"),
    [
        (1.0, "relative", [250, 200 / 3, 650, 1400 / 3]),
        (0.5, "relative", [250, 200 / 3, 650, 1400 / 3]),
        (1.0, "pixels", list(BOX)),
        (0.5, "pixels", [side / 2 for side in BOX]),
    ],
)
def test_a_crop_is_pillows_whatever_the_coordinates(
    share: float, coordinates: str, box: list[float]
) -> None:
    expected = NOISE.crop(BOX)
    played = Played(encode(NOISE), share=share, coordinates=coordinates)
    assert (pixels(played.seen("zoom", box=box)) == pixels(expected)).all()
    family = Played(encode(NOISE), share=share, chat=ChatFormat(coordinates=coordinates))  # type: ignore[arg-type]
    assert (pixels(family.seen("zoom", box=box, image=1)) == pixels(expected)).all()


def test_a_small_crop_is_enlarged_and_a_large_one_shrunk_to_the_budget() -> None:
    played = Played(encode(NOISE), min_tokens=12, room=40)
    small = played.seen("zoom", box=[0, 0, 100, 100])  # 56 x 42
    resized = NOISE.crop((0, 0, 56, 42)).resize((4 * SIDE, 3 * SIDE), Picture.Resampling.LANCZOS)
    assert (pixels(small) == pixels(resized)).all()
    assert played.seen("zoom", box=[0, 0, 1000, 1000]).size == (7 * SIDE, 5 * SIDE)
    whole = {"box": [0, 0, 1000, 1000]}
    first, second = played.calls(("zoom", whole), ("rotate", {"degrees": 90}))
    for _, image in (first, second):
        across, down = (side / SIDE for side in decode(image.data).size)
        assert across * down <= (40 + 32) / 2 - 32, "calls of a turn share its observation"


def test_a_crop_touches_a_pixel_and_is_cut_off_at_the_edges() -> None:
    played = Played(encode(NOISE), coordinates="pixels")
    dot = played.seen("zoom", box=[10.2, 10.2, 10.4, 10.4])
    assert (pixels(dot) == pixels(NOISE)[10, 10]).all()
    over = played.seen("zoom", box=[504, 364, 600, 500])
    assert (pixels(over) == pixels(NOISE.crop((504, 364, 560, 420)))).all()


def test_a_photo_is_cropped_as_it_is_seen() -> None:
    """Its EXIF orientation turns it by a quarter."""
    file, exif = io.BytesIO(), Picture.Exif()
    exif[0x0112] = 6
    NOISE.save(file, "PNG", exif=exif)
    upright = NOISE.transpose(Picture.Transpose.ROTATE_270)
    shown = Played(file.getvalue(), coordinates="pixels").seen("zoom", box=[28, 56, 112, 224])
    assert (pixels(shown) == pixels(upright.crop((28, 56, 112, 224)))).all()


@pytest.mark.parametrize(("degrees", "turned"), [(90, "ROTATE_270"), (180, "ROTATE_180")])
def test_rotation_is_clockwise(degrees: int, turned: str) -> None:
    expected = NOISE.transpose(Picture.Transpose[turned])
    shown = Played(encode(NOISE)).seen("rotate", degrees=degrees)
    assert (pixels(shown) == pixels(expected)).all()


def test_a_mark_is_drawn_where_it_was_asked_for() -> None:
    plain = Picture.new("RGB", (560, 420), "white")
    expected = plain.copy()
    ImageDraw.Draw(expected).rectangle((56, 84, 280, 336), outline="red", width=3)
    box = Played(encode(plain)).seen("mark", place=[100, 200, 500, 800])
    assert (pixels(box) == pixels(expected)).all()
    small = Played(encode(plain), room=12, share=0.25)  # 4 x 3 tokens
    point = pixels(small.seen("mark", place=[500, 250]))
    assert point.shape[:2] == (3 * SIDE, 4 * SIDE)
    red = (point == (255, 0, 0)).all(-1).nonzero()
    assert [round(axis.mean()) for axis in red] == [21, 56] and np.ptp(red[0]) == 16


def test_a_step_has_its_actions_in_fractions_of_the_image_that_they_name() -> None:
    played = Played(encode(NOISE), share=0.5, coordinates="pixels")
    played.seen("zoom", box=[28, 21, 140, 210])
    image = hashlib.sha256(encode(NOISE)).hexdigest()
    box = [0.1, 0.1, 0.5, 1.0]
    assert [action.values() for action in played.environment.actions] == [
        {"kind": "zoom", "image": image, "at": pytest.approx(box)}
    ]
    crop = played.environment._files[1]
    played.calls(("rotate", {"degrees": 90, "image": 2}), ("mark", {"place": [28, 105]}))
    assert [action.values() for action in played.environment.actions] == [
        {"kind": "rotate", "image": hashlib.sha256(crop).hexdigest(), "amount": 90.0},
        {"kind": "mark", "image": image, "at": pytest.approx([0.1, 0.5])},
    ]
    played.error("zoom", box=[0, 0, 9, 9], image=7)
    assert not played.environment.actions


def test_results_count_on_and_only_what_was_seen_can_be_named() -> None:
    played = Played(encode(NOISE), encode(NOISE.crop((0, 0, 56, 56))), room=300)
    ((label, first),) = played.calls(("zoom", {"box": [0, 0, 500, 500]}))
    assert label == "Image 3:"
    again = played.seen("zoom", box=[0, 0, 500, 500], image=3)
    assert (pixels(again) == pixels(decode(first.data).crop((0, 0, 140, 112)))).all()
    ((label, _),) = played.calls(("rotate", {"degrees": 45}), shown=False)
    assert label == "Image 5:"
    refused = played.error("zoom", box=[0, 0, 500, 500], image=5)
    assert refused == "there is no image 5; the images that you have seen: 1, 2, 3, 4"
    ((label, _),) = played.calls(("zoom", {"box": [0, 0, 500, 500], "image": 2}))
    assert label == "Image 6:"


def test_a_bad_call_is_one_sentence() -> None:
    played = Played(encode(NOISE))
    for arguments, text in (
        ({"box": [500, 0, 500, 9]}, "the box [500, 0, 500, 9] is empty: left must be below right"),
        ({"box": [700, 0, 500, 9]}, "the box [700, 0, 500, 9] is empty: left must be below right"),
        (
            {"box": [1000, 0, 1200, 9]},
            "the box [1000, 0, 1200, 9] is outside of the image; image 1 spans [0, 0, 1000, 1000]",
        ),
        ({"box": [0, 0, 1, 1000]}, "it would be 1 x 420 pixels, too narrow to be seen"),
        ({"box": [0, 0, 9, 9], "image": 2}, "there is no image 2; the images that you have"),
        ({"box": [0, 0, 9, 9], "image": 0}, "there is no image 0"),
        ({"box": [0, 0, 9]}, "zoom: box: List should have at least 4 items"),
        ({"box": [0, 0, 9, float("nan")]}, "the call is not JSON (NaN is not a JSON value)"),
        ({}, "zoom: box: Missing required argument"),
    ):
        assert played.error("zoom", **arguments).startswith(text)
    assert played.error("mark", place=[1, 2, 3]).startswith("mark: place has 3 numbers")
    assert played.error("mark", place=[1, 2000]) == (
        "the point [1, 2000] is outside of image 1 with the span [0, 0, 1000, 1000]"
    )
    pixel = Played(encode(NOISE), share=0.5, coordinates="pixels")
    assert "spans [0, 0, 280, 210]" in pixel.error("zoom", box=[300, 0, 400, 10])
    assert Played().error("zoom", box=[0, 0, 9, 9]).endswith("that you have seen: none")


def test_the_policy_reads_in_which_coordinates_it_is_to_write() -> None:
    for coordinates, words in (("relative", "from 0 to 1000"), ("pixels", "in pixels")):
        tools = Played(encode(NOISE), coordinates=coordinates).start.tools
        assert [shown["function"]["name"] for shown in tools] == ["zoom", "rotate", "mark"]
        zoom, _, mark = (shown["function"]["description"] for shown in tools)
        assert words in zoom and words in mark
    assert Played(encode(NOISE), show_tools=False).start.tools == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"coordinates": "absolute"}, "coordinates='absolute' must be relative or pixels"),
        ({"min_tokens": 0}, "min_tokens=0 must be a number of at least 1"),
        ({"min_tokens": True}, "min_tokens=True must be a number of at least 1"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"environment\.options\.{text}"):
        asyncio.run(Zoom(Context(right, 1), **options).check())


class Contrast(Zoom):
    @tool
    def grey(self, image: int = 1) -> Sequence[str | Image]:
        """Show an image in shades of grey."""
        return self.show(image, lambda shown: shown.convert("L").convert("RGB"))


def test_a_class_of_the_users_adds_a_tool() -> None:
    played = Played(encode(NOISE), cls=Contrast)
    assert [shown["function"]["name"] for shown in played.start.tools][-1] == "grey"
    assert (pixels(played.seen("grey")) == pixels(NOISE.convert("L").convert("RGB"))).all()
