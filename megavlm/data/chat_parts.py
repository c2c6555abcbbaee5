"""Content of chat messages: text, or parts of text, images and videos.

The forms are those of transformers ({type: image, image | url | path | base64: ...}), of OpenAI
({type: image_url, image_url: {url: ...}}, and input_text, input_image) and of qwen-vl-utils
({type: video, video: [FRAME, ...], sample_fps: ...}). Every key is understood or refused.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

IMAGE_PLACEHOLDER = "<image>"
VIDEO_PLACEHOLDER = "<video>"

_KINDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
}
_SOURCES = ("bytes", "url", "path", "base64")
_IMAGE_KEYS = ("image", "image_url", *_SOURCES)
_VIDEO_KEYS = ("video", "video_url", *_SOURCES)
# Hints to OpenAI's servers and caches, which change nothing of what is shown.
_IGNORED = ("detail", "cache_control", "annotations")


@dataclass
class Parts:
    """Images and videos of the messages read so far.

    num_bare: parts of each kind ("image", "video") whose item is in a column.
    """

    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    num_bare: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Number of images and videos."""
        return len(self.images) + len(self.videos) + self.num_bare.total()

    def text(self, content: str | Sequence[Any], where: str) -> str:
        """Return content as text with placeholders, and keep its images and videos.

        Raises ValueError, beginning with `where`, for a part that is not understood.
        """
        parts = [content] if isinstance(content, str) else content
        return "".join(self._part(part, where) for part in parts)

    def _part(self, part: Any, where: str) -> str:
        if isinstance(part, str):
            return part
        given = {} if not isinstance(part, Mapping) else _present(part)
        named = given.pop("type", next((key for key in _KINDS if key in given), None))
        kind = _KINDS.get(str(named))
        if kind is None or (kind == "text" and not isinstance(given.get("text"), str)):
            raise ValueError(
                f"{where} has the part {part!r:.80}; its type must be text, image or video"
            )
        if kind == "text":
            text = given.pop("text")
        elif kind == "image":
            text = self._image(given, where)
        else:
            text = self._video(given, where)
        if given.get("text") == "":
            del given["text"]
        if given:
            raise ValueError(
                f"{where} has a part of type {kind} with the key {next(iter(given))!r}, which "
                "is not read; remove it"
            )
        return text

    def _image(self, given: dict[str, Any], where: str) -> str:
        """Keep the image of a part, whose keys are taken out of `given`."""
        index = given.pop("index", None)
        if index is not None and index != len(self.images) + self.num_bare["image"]:
            raise ValueError(
                f"{where} has an image part with index={index!r:.80}; images are taken in order"
            )
        found = {key: given.pop(key) for key in _IMAGE_KEYS if key in given}
        if not found:
            self.num_bare["image"] += 1
            return IMAGE_PLACEHOLDER
        item = _item(found, where)
        if isinstance(item, Mapping):
            item = _present(item)
            if unknown := item.keys() - set(_SOURCES):
                raise ValueError(
                    f"{where} has an image with the key {min(unknown)!r}; it must be one of "
                    f"{', '.join(_SOURCES)}"
                )
            item = item["url"] if item.keys() == {"url"} else item
        self.images.append(item)
        return IMAGE_PLACEHOLDER

    def _video(self, given: dict[str, Any], where: str) -> str:
        """Keep the video of a part, whose keys are taken out of `given`."""
        found = {key: given.pop(key) for key in _VIDEO_KEYS if key in given}
        if not found:
            self.num_bare["video"] += 1
            return VIDEO_PLACEHOLDER
        item = _item(found, where)
        if isinstance(item, list):
            rates = [given.pop(key) for key in ("sample_fps", "fps") if key in given]
            item = {"frames": item, "fps": rates[0] if rates else None}
        self.videos.append(item)
        return VIDEO_PLACEHOLDER


def _present(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a part that have a value and a meaning."""
    return {k: v for k, v in part.items() if v is not None and k not in _IGNORED}


def _item(found: Mapping[str, Any], where: str) -> Any:
    """Return the image or video of a part: the value of its one key, or a struct of sources."""
    if found.keys() <= set(_SOURCES):
        return dict(found)
    if len(found) > 1:
        raise ValueError(
            f"{where} has a part with the keys {', '.join(found)}; its image or video must be in "
            "one of them"
        )
    (value,) = found.values()
    return value
