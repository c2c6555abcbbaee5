"""Pixel limits of training in the preprocessor files of an exported model."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IMAGES, VIDEOS = "preprocessor_config.json", "video_preprocessor_config.json"
PROCESSOR = "processor_config.json"  # has images and videos since transformers 5; it is read first
_KEYS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def write_pixel_limits(folder: Path, limits: Mapping[str, int]) -> None:
    """Write `min_pixels` and `max_pixels` of images, if they are given, under each name by which
    transformers and SGLang read them. The limits of videos are not changed.
    """
    if not limits:
        return
    whole = _read(folder / PROCESSOR)
    alone = _read(folder / IMAGES)
    if alone and not (folder / VIDEOS).is_file() and "video_processor" not in whole:
        # Without this file, transformers reads the limits of videos from the one of images.
        shutil.copyfile(folder / IMAGES, folder / VIDEOS)
    for name, content, images in (
        (IMAGES, alone, alone),
        (PROCESSOR, whole, whole.get("image_processor")),
    ):
        if images:
            _limit(images, limits)
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _limit(images: dict[str, Any], limits: Mapping[str, int]) -> None:
    size = images.get("size") or {}
    for key, value in limits.items():
        if key in images or not size:  # released folders have the key; it overrides `size`
            images[key] = value
        for name in (key, _KEYS[key]):
            if name in size:
                size[name] = value


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.is_file() else {}
