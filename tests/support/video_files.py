"""Video files made of given frames."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np


def encode_video(
    frames: Sequence[Any], fps: int, format_: str = "mp4", codec: str = "libx264", **options: str
) -> bytes:
    """Return a file of frames [H, W, 3], of even sizes. options: the format's, not the codec's."""
    height, width, _ = frames[0].shape
    with TemporaryDirectory() as folder:
        file = Path(folder, "video")  # FFmpeg opens it twice to move the index to its start
        with av.open(str(file), "w", format=format_, options=options) as container:
            stream: Any = container.add_stream(codec, rate=fps)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for frame in frames:
                pixels = np.ascontiguousarray(frame, dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        return file.read_bytes()


def grey_video(number: int, fps: int = 10, size: tuple[int, int] = (64, 48), **how: str) -> bytes:
    """Return a file whose frame i is grey of level 5 i (modulo 250)."""
    width, height = size
    frames = [np.full((height, width, 3), 5 * i % 250, np.uint8) for i in range(number)]
    return encode_video(frames, fps, **how)
