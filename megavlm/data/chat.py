"""Chat messages of a prompt, read from a column, with placeholders for their images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IMAGE_PLACEHOLDER = "<image>"
VIDEO_PLACEHOLDER = "<video>"
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Message:
    """A chat message. `text` has a placeholder for each of its images and videos."""

    role: str
    text: str


@dataclass(frozen=True)
class Chat:
    """Messages and the images stored in them, in order and encoded as they are stored."""

    messages: tuple[Message, ...]
    images: tuple[Any, ...] = ()


def read_chat(value: Sequence[Any]) -> Chat:
    """Read a list of {role, content}; content is text, or a list of parts.

    A part is {type: text, text}, {type: image} or {type: video}, whose item is in the image or
    video column, {type: image, image: IMAGE} or {type: image_url, image_url: {url: IMAGE}}.
    Raises ValueError for anything else.
    """
    messages, images = [], list[Any]()
    for number, message in enumerate(value):
        where = f"message {number}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} is {message!r:.80}; it must have a role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"{where} has the role {role!r}; it must be one of {', '.join(ROLES)}")
        parts = [content] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise ValueError(f"{where} has the content {content!r:.80}; it must be text or parts")
        messages.append(Message(role, "".join(_part(part, where, images) for part in parts)))
    if not any(message.role == "user" for message in messages):
        raise ValueError("the messages have none by the user")
    return Chat(tuple(messages), tuple(images))


def _part(part: Any, where: str, images: list[Any]) -> str:
    """Return a part as text. An image stored in it is appended to `images`."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "video":
        return VIDEO_PLACEHOLDER
    if kind in ("image", "image_url"):
        item = part.get(kind)
        if isinstance(item, Mapping) and "url" in item:
            item = item["url"]
        if item is not None:
            images.append(item)
        return IMAGE_PLACEHOLDER
    raise ValueError(f"{where} has the part {part!r:.80}; its type must be text, image or video")
