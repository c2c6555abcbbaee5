"""Messages in the form of OpenAI's chat completions: checked, compared, and made into a row."""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megavlm.data.chat import IMAGE_PLACEHOLDER, ROLES, Message
from megavlm.data.rows import Row
from megavlm.rollout.gateway.errors import BadRequest

_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
# Keys of replies that clients send back. They hold nothing that a model could see.
_EMPTY_KEYS = {"refusal", "audio", "function_call", "annotations"}


@dataclass(frozen=True)
class ChatPart:
    """A piece of content: text, or an image file. key: Identifies it."""

    text: str = ""
    image: bytes | None = None

    @property
    def key(self) -> tuple[str, str]:
        if self.image is None:
            return "text", self.text
        return "image", hashlib.sha256(self.image).hexdigest()


@dataclass(frozen=True)
class ChatMessage:
    """A message of a request. calls: Name and arguments of each tool call; ids are dropped.
    thought: None if the message does not give it.
    """

    role: str
    parts: tuple[ChatPart, ...]
    calls: tuple[tuple[str, Any], ...] = ()
    thought: str | None = None
    name: str | None = None

    def equals(self, other: "ChatMessage") -> bool:
        """Return True if the messages say the same. A thought counts where both give it: many
        clients do not send it back.
        """
        thoughts = {self.thought, other.thought} - {None}
        return (
            (self.role, self.calls) == (other.role, other.calls)
            and [part.key for part in self.parts] == [part.key for part in other.parts]
            and len(thoughts) < 2
        )


def read_messages(values: Any) -> tuple[ChatMessage, ...]:
    """Read the messages of a request. Raises BadRequest for a form that is not understood."""
    if not isinstance(values, list) or not values:
        raise BadRequest("messages must be a list with at least one message")
    return tuple(_message(value, number) for number, value in enumerate(values))


def _message(value: Any, number: int) -> ChatMessage:
    where = f"messages[{number}]"
    if not isinstance(value, Mapping):
        raise BadRequest(f"{where} must be an object with role and content")
    role = "system" if value.get("role") == "developer" else value.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role={role!r:.40} must be one of {', '.join(ROLES)}")
    given = {key for key, item in value.items() if item is not None}
    if unknown := {key for key in given - _KEYS if key not in _EMPTY_KEYS or value[key]}:
        raise BadRequest(f"{where} has the key {min(unknown)!r}, which the gateway does not read")
    for key, kind in (("reasoning_content", str), ("name", str), ("tool_calls", list)):
        if key in given and not isinstance(value[key], kind):
            raise BadRequest(f"{where}.{key}={value[key]!r:.40} must be of type {kind.__name__}")
    if value.get("tool_calls") and role != "assistant":
        raise BadRequest(f"{where} has tool_calls, but is not the assistant's")
    return ChatMessage(
        role,
        _content(value.get("content"), where),
        tuple(_call(call, where) for call in value.get("tool_calls") or ()),
        value.get("reasoning_content") if role == "assistant" else None,
        value.get("name"),
    )


def _content(content: Any, where: str) -> tuple[ChatPart, ...]:
    """Return content as parts, with neighbouring texts joined and empty ones left out."""
    items = [content or ""] if isinstance(content, str | None) else content
    if not isinstance(items, list):
        raise BadRequest(f"{where}.content must be text or a list of parts")
    parts: list[ChatPart] = []
    for item in items:
        part = ChatPart(item) if isinstance(item, str) else _part(item, where)
        if part.image is None and parts and parts[-1].image is None:
            parts[-1] = ChatPart(parts[-1].text + part.text)
        elif part.image is not None or part.text:
            parts.append(part)
    return tuple(parts)


def _part(item: Any, where: str) -> ChatPart:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind == "text" and isinstance(item.get("text"), str):
        return ChatPart(item["text"])
    if kind != "image_url":
        raise BadRequest(f"{where}.content has the part {item!r:.80}; it may be text or image_url")
    url = item.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str) or not url.startswith("data:"):
        raise BadRequest(
            f"{where}.content has the image_url {url!r:.80}: the gateway downloads nothing; send "
            "the image as a data: URL in base64"
        )
    try:
        return ChatPart(image=base64.b64decode(url.partition(";base64,")[2], validate=True))
    except binascii.Error as error:
        raise BadRequest(f"{where}.content has an image that is not base64 ({error})") from error


def _call(call: Any, where: str) -> tuple[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}.tool_calls has {call!r:.80}, which calls no function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # compared and shown as it is
    return function["name"], arguments


def as_row(
    base: Row,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    spell: Callable[[str], str],
) -> Row:
    """Return messages as a row. spell: Function that makes control tokens in a text plain text."""
    messages = [_spelled(message, spell) for message in messages]
    asked = [message for message in messages if message.role == "user"] or messages[-1:]
    images = tuple(p.image for m in messages for p in m.parts if p.image is not None)
    return replace(
        base,
        problem=_shown(asked[-1]),
        images=images,
        videos=(),
        messages=tuple(_chat_message(message, in_parts=bool(images)) for message in messages),
        tools=tuple(tools),
        response=None,
    )


def _spelled(message: ChatMessage, spell: Callable[[str], str]) -> ChatMessage:
    parts = tuple(replace(part, text=spell(part.text)) for part in message.parts)
    return replace(message, parts=parts, thought=spell(message.thought or ""))


def _chat_message(message: ChatMessage, *, in_parts: bool) -> Message:
    """in_parts: True if a placeholder in text would stand for an image of the row."""
    keys: dict[str, Any] = {}
    if message.calls:
        functions = ({"name": name, "arguments": values} for name, values in message.calls)
        keys["tool_calls"] = [{"type": "function", "function": f} for f in functions]
    if message.thought:
        keys["reasoning_content"] = message.thought
    if message.name:
        keys["name"] = message.name
    text = _shown(message)
    if not (in_parts and (message.role == "user" or IMAGE_PLACEHOLDER in text)):
        return Message(message.role, text, keys)
    parts = tuple(
        {"type": "text", "text": part.text} if part.image is None else {"type": "image"}
        for part in message.parts
    )
    return Message(message.role, text, keys, parts=parts)


def _shown(message: ChatMessage) -> str:
    return "".join(part.text if part.image is None else IMAGE_PLACEHOLDER for part in message.parts)
