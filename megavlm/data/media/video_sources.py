"""Encoded videos from the cells of a video column: files, or frames that are already sampled."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from PIL import Image

from megavlm.data.media.image_decoding import decode
from megavlm.data.media.image_sources import DataFolder, check_keys, is_url, media_bytes
from megavlm.data.media.video_decoding import decode_frames, read_header


@dataclass(frozen=True)
class Video:
    """A video as frames that are already sampled."""

    frames: tuple[bytes, ...]  # images as they are stored, in order
    fps: float  # frame rate of these frames: frame i is shown at i / fps seconds


@dataclass(frozen=True)
class VideoFile:
    """A video file as it is stored; frames are sampled when it is processed."""

    data: bytes


AnyVideo = Video | VideoFile


def read_video(value: Any, folder: DataFolder) -> AnyVideo:
    """Return the video of a cell, without decoding it: a struct of `frames`, a list of images, and
    `fps`; or a file in any form that an image may have.

    Raises ValueError for anything else.
    """
    if not isinstance(value, dict) or value.get("frames") is None:
        return VideoFile(media_bytes(value, folder, "video"))
    check_keys(value, ("frames", "fps"), "video")
    if not isinstance(value["frames"], list):
        raise ValueError(f"a video's frames are {value['frames']!r:.80}; they must be a list")
    fps = value.get("fps")
    if not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise ValueError(f"a video's fps is {fps!r}; it must be a number above 0")
    return Video(tuple(media_bytes(frame, folder) for frame in value["frames"]), float(fps))


def is_fetched_video(value: Any) -> bool:
    """Return True if the file or a frame of a cell is fetched over http(s)."""
    if isinstance(value, dict) and isinstance(value.get("frames"), list):
        return any(map(is_url, value["frames"]))
    return is_url(value, "video")


def check_video(video: AnyVideo) -> None:
    """Raise ValueError for a frame that cannot be decoded, and for a file whose first frame
    cannot.
    """
    if isinstance(video, VideoFile):
        read_header(video.data)
        return
    for number, frame in enumerate(video.frames, 1):
        try:
            decode(frame)
        except ValueError as error:
            raise ValueError(f"frame {number}: {error}") from error


def pictures(images: Iterable[bytes], videos: Iterable[AnyVideo]) -> list[Image.Image]:
    """Return the images, and the first frame of each video, for a page that shows them."""
    frames = [
        Image.fromarray(next(decode_frames(video.data, [0])))
        if isinstance(video, VideoFile)
        else decode(video.frames[0])
        for video in videos
    ]
    return [*map(decode, images), *frames]
