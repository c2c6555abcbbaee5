"""The inputs of the parity matrix, by name: prompts with images and videos, and responses."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from megavlm.data.chat.messages import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from megavlm.data.media.audio_decoding import audio_bytes
from megavlm.data.media.image_sources import DataFolder
from megavlm.data.media.video_sources import Video
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.families import family_of
from megavlm.model_config import model_config
from tests.conftest import DATA
from tests.parity.reference import Sequences
from tests.support.random_images import image

QUESTION = "Find x in the triangle. How many blue circles?"


def video(width: int, height: int, num_frames: int, seed: int, fps: float = 2.0) -> Video:
    frames = tuple(image(width, height, seed + index) for index in range(num_frames))
    return Video(frames, fps)


def clip(seconds: float, seed: int, rate: int = 16_000) -> bytes:
    """A tone that rises, and noise."""
    time = np.arange(int(seconds * rate)) / rate
    tone = np.sin(2 * np.pi * (200 + 50 * seed + 300 * time) * time)
    noise = np.random.default_rng(seed).normal(size=len(time))
    value = {"array": 0.3 * tone + 0.05 * noise, "sampling_rate": rate}
    return audio_bytes(value, DataFolder("."))


class Inputs:
    """Makes the sequences of a case for a model folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processor = Processor(folder, DATA, family_of(folder))
        self.config = model_config(folder)
        self._made: dict[str, list[Sequences]] = {}

    def sequences(self, name: str) -> list[Sequences]:
        if name not in self._made:
            self._made[name] = MAKERS[name](self)
        return self._made[name]

    def case(
        self,
        seed: int,
        *,
        text: int = 20,
        images: Sequence[bytes] = (),
        videos: Sequence[Video] = (),
        audio: Sequence[bytes] = (),
        responses: Sequence[int] = (5,),
    ) -> Sequences:
        """`text`: characters of the question; `responses`: their numbers of tokens."""
        problem = (
            AUDIO_PLACEHOLDER * len(audio)
            + VIDEO_PLACEHOLDER * len(videos)
            + IMAGE_PLACEHOLDER * len(images)
        )
        problem += (QUESTION * 9)[seed : seed + text]
        row = Row(seed, problem, "", tuple(images), "", f"case {seed}", tuple(videos), tuple(audio))
        generator = np.random.default_rng(seed)
        answers = [generator.integers(0, 250, size).tolist() for size in responses]
        return Sequences(self.processor.prompt(row), answers)


@cache
def inputs_of(folder: Path) -> Inputs:
    """Return the inputs of a folder, loaded once a process; ranks have those that it had."""
    return Inputs(folder)


def _mixed(make: Inputs) -> list[Sequences]:
    """A bit of everything: packs that differ in length, in images and in trees."""
    return [
        make.case(1, images=[image(64, 64, 1)], responses=(3, 5)),
        make.case(2, images=[image(288, 96, 2), image(128, 192, 3)], responses=(4,)),
        make.case(3, text=31, responses=(2, 3, 4)),
        make.case(4, videos=[video(96, 64, 4, 4)], responses=(3,)),
        make.case(5, images=[image(96, 160, 9)], videos=[video(64, 96, 2, 10)], responses=(4, 1)),
        make.case(6, text=7, images=[image(64, 64, 1)], responses=(6,)),
        make.case(7, text=60, responses=(1,)),
        make.case(8, images=[image(64, 128, 12)], responses=(2, 2)),
    ]


def _one_image(make: Inputs) -> list[Sequences]:
    return [make.case(i, images=[image(64 + 32 * i, 96, i)]) for i in range(4)]


def _several_images(make: Inputs) -> list[Sequences]:
    return [make.case(i, images=[image(64, 64, 8 * i + j) for j in range(1 + i)]) for i in range(4)]


def _sizes(make: Inputs) -> list[Sequences]:
    """From one merged patch row to several windows of the tower a side."""
    sizes = [(64, 64), (448, 64), (64, 352), (256, 256)]
    return [make.case(i, images=[image(*size, i)]) for i, size in enumerate(sizes)]


def _video(make: Inputs) -> list[Sequences]:
    return [
        make.case(i, videos=[video(64, 64 + 32 * i, 2 * i + 2, 10 * i, fps=1.0 + i)])
        for i in range(4)
    ]


def _text_only(make: Inputs) -> list[Sequences]:
    """The tower is trained and has nothing to see."""
    return [make.case(i, text=10 + 9 * i, responses=(3, 2 + i)) for i in range(4)]


def _straddling(make: Inputs) -> list[Sequences]:
    """One long prompt whose image lies across every cut of the context and sequence axes."""
    return [make.case(i, text=6, images=[image(320, 320, i)], responses=(2,)) for i in range(4)]


def _padding(make: Inputs) -> list[Sequences]:
    """Lengths that no axis divides, and a response of a single token."""
    return [
        make.case(i, text=3 + i, images=[image(64, 64, i)][: i % 2], responses=(1,) * (1 + i))
        for i in range(4)
    ]


def _branches(make: Inputs) -> list[Sequences]:
    """Many branches of one prompt."""
    return [make.case(i, images=[image(96, 96, i)], responses=(2, 7, 3, 5, 1)) for i in range(4)]


def _audio(make: Inputs) -> list[Sequences]:
    """Clips of several chunks and windows, two of less than a window, with an image and a video;
    one sequence without a clip.
    """
    return [
        make.case(1, audio=[clip(1.3, 1)], responses=(3, 2)),
        make.case(
            2, audio=[clip(1.0, 2), clip(4.57, 3), clip(0.31, 5)], videos=[video(64, 64, 4, 6)]
        ),
        make.case(3, audio=[clip(2.2, 4)], images=[image(64, 96, 5)], responses=(2, 4)),
        make.case(4, images=[image(96, 64, 7)]),
    ]


def _few_images(make: Inputs) -> list[Sequences]:
    """One data rank of two has no image at all, and one pack of two has none."""
    shown = make.case(4, images=[image(96, 64, 4)])
    return [make.case(1), make.case(2, responses=(2, 3)), make.case(3), shown]


MAKERS: dict[str, Callable[[Inputs], list[Sequences]]] = {
    "mixed": _mixed,
    "one image": _one_image,
    "several images": _several_images,
    "sizes": _sizes,
    "video": _video,
    "text only": _text_only,
    "straddling": _straddling,
    "padding": _padding,
    "branches": _branches,
    "audio": _audio,
    "few images": _few_images,
}
