"""Decoding of untrusted video files by PyAV, an optional package."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from megavlm.data.media.image_decoding import MAX_PIXELS

# FFmpeg's readers of files that hold a whole video. A playlist would name other files and URLs.
FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,ogg,asf,gif"
MAX_FRAMES = 2**18  # limit of a file, 2.4 hours at 30 frames per second: all are decoded in order


@dataclass(frozen=True)
class VideoHeader:
    """Number of frames of a video file, their upright size in pixels, and their average rate."""

    num_frames: int
    width: int
    height: int
    fps: float


def read_header(data: bytes) -> VideoHeader:
    """Return the header of a video file, decoding only its first frame. Frames are counted, because
    not every format stores their number.

    Raises ValueError for bytes that are not a video in one of FORMATS, a file that was cut off,
    and a video above MAX_FRAMES or MAX_PIXELS. Also raises ValueError if PyAV is not installed.
    """
    with _opened(data) as (container, stream):
        packets = [packet for packet in container.demux(stream) if packet.size]
        if len(packets) < stream.frames:
            raise ValueError(
                f"the video file is cut off: it has {len(packets)} of {stream.frames} frames"
            )
        number = sum(not packet.is_discard for packet in packets)
        rate = stream.average_rate or stream.guessed_rate
    if number > MAX_FRAMES:
        raise ValueError(f"a video of {number} frames has more than {MAX_FRAMES}; cut it in parts")
    if not rate:
        raise ValueError("the video file has no frame rate; encode it again")
    first = next(decode_frames(data, [0]))
    return VideoHeader(number, first.shape[1], first.shape[0], float(rate))


def decode_frames(data: bytes, indices: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the frames [H, W, 3] uint8 at ascending indices, turned upright.

    Raises ValueError as `read_header` does, and for a file whose content is broken.
    """
    wanted, number = set(indices), 0
    with _opened(data) as (container, stream):
        for frame in container.decode(stream):
            if number in wanted:
                pixels = frame.to_ndarray(format="rgb24")
                # FFmpeg stores how far a player turns the frame, counter-clockwise.
                yield np.rot90(pixels, round(frame.rotation / 90)) if frame.rotation else pixels
            number += 1
            if number > indices[-1]:
                return
    raise ValueError(f"the video file is broken: only {number} of its frames can be decoded")


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """Open a file and its first video stream. Errors of FFmpeg become ValueErrors with a reason."""
    try:
        import av
    except ImportError as error:
        raise ValueError(
            "video files need PyAV, but it is not installed: pip install "
            "'megavlm[video]', or store the video as frames"
        ) from error
    try:
        with av.open(BytesIO(data), options={"format_whitelist": FORMATS}) as container:
            if not container.streams.video:
                raise ValueError("the file has no video, only sound or text")
            stream = container.streams.video[0]
            width, height = stream.codec_context.width, stream.codec_context.height
            if width * height > MAX_PIXELS:
                raise ValueError(
                    f"{width} x {height} is larger than the limit of {MAX_PIXELS} pixels"
                )
            stream.thread_type = "AUTO"
            yield container, stream
    except av.FFmpegError as error:
        raise ValueError(
            f"not a video that can be decoded, in one of {FORMATS.replace(',', ', ')} "
            f"({error.strerror})"
        ) from error
