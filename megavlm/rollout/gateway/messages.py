"""Messages in the form of OpenAI's chat completions: checked, compared, and made into a row."""

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from megavlm.data.chat.messages import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER, Message
from megavlm.data.rows import Row

# Keys of replies that clients send back. They hold nothing that a model could see.
_EMPTY_KEYS = {"refusal", "audio", "function_call", "annotations"}


class Form(BaseModel):
    """A JSON object of OpenAI's API. A key with null counts as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            key: value
            for key, value in values.items()
            if value is not None and (value or key not in _EMPTY_KEYS)
        }


def _image(url: Any) -> bytes:
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ValueError("the gateway downloads nothing; send the image as a data: URL in base64")
    return _base64(url.partition(";base64,")[2], "image")


def _audio(given: Any) -> bytes:
    data = given.get("data") if isinstance(given, Mapping) else None
    if not isinstance(data, str):
        raise ValueError("input_audio has no data; send the file in base64")
    return _base64(data, "audio")


def _base64(text: str, kind: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the {kind} is not base64 ({error})") from error


# The field of a part that each of its types must have.
_FIELDS = {"text": "text", "image_url": "image", "input_audio": "audio"}
# What stands for a part that is not text.
_PLACEHOLDERS = {"image_url": IMAGE_PLACEHOLDER, "input_audio": AUDIO_PLACEHOLDER}


class ChatPart(Form, extra="ignore"):
    """A piece of content: text, an image file or an audio file."""

    type: Literal["text", "image_url", "input_audio"]
    text: str = ""
    image: Annotated[bytes, BeforeValidator(_image)] = Field(b"", alias="image_url")
    audio: Annotated[bytes, BeforeValidator(_audio)] = Field(b"", alias="input_audio")

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, part: Any) -> Any:
        return {"type": "text", "text": part} if isinstance(part, str) else part

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if _FIELDS[self.type] not in self.model_fields_set:
            raise ValueError(f"the part has no {self.type}")
        return self


def _arguments(values: Any) -> Any:
    try:
        return json.loads(values) if isinstance(values, str) and values else values or {}
    except (ValueError, RecursionError):
        return values  # compared and shown as it is


class ChatFunction(Form, extra="ignore"):
    """The function of a tool, with its parameters, or of a call, with its arguments."""

    name: str
    parameters: dict[str, Any] = {}
    arguments: Annotated[Any, BeforeValidator(_arguments)] = {}


class ChatTool(Form, extra="ignore"):
    """A tool, or a call of one. Ids of calls are dropped."""

    function: ChatFunction


class ChatMessage(Form):
    """A message of a request.

    content: Parts, with neighbouring texts joined and no empty ones. thought: None if the message
    does not give it.
    """

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[
        list[ChatPart], BeforeValidator(lambda text: [text] if isinstance(text, str) else text)
    ] = []
    name: str | None = None
    thought: str | None = Field(None, alias="reasoning_content")
    tool_calls: list[ChatTool] = []
    tool_call_id: Any = None

    @field_validator("content")
    @classmethod
    def _joined(cls, parts: list[ChatPart]) -> list[ChatPart]:
        joined: list[ChatPart] = []
        for part in parts:
            if part.type == "text" and joined and joined[-1].type == "text":
                part = part.model_copy(update={"text": joined.pop().text + part.text})
            joined.append(part)
        return [part for part in joined if part.type != "text" or part.text]

    @field_validator("tool_calls")
    @classmethod
    def _by_assistant(cls, calls: list[ChatTool], info: ValidationInfo) -> list[ChatTool]:
        if calls and info.data.get("role") != "assistant":
            raise ValueError("only a message of the assistant has calls")
        return calls

    def equals(self, other: "ChatMessage") -> bool:
        """Return True if the messages say the same. A thought counts where both give it: many
        clients do not send it back.
        """
        thoughts = {self.thought, other.thought} - {None}
        said = [(message.role, message.content, message.tool_calls) for message in (self, other)]
        return said[0] == said[1] and len(thoughts) < 2


def as_row(
    base: Row,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    spell: Callable[[str], str],
) -> Row:
    """Return messages as a row. spell: Function that makes control tokens in a text plain text."""
    messages = [_spelled(message, spell) for message in messages]
    asked = [message for message in messages if message.role == "user"] or messages[-1:]
    parts = [part for message in messages for part in message.content]
    images = tuple(part.image for part in parts if part.type == "image_url")
    audio = tuple(part.audio for part in parts if part.type == "input_audio")
    in_parts = bool(images or audio)
    return replace(
        base,
        problem=_shown(asked[-1]),
        images=images,
        videos=(),
        audio=audio,
        messages=tuple(_chat_message(message, in_parts=in_parts) for message in messages),
        tools=tuple(tools),
        response=None,
    )


def _spelled(message: ChatMessage, spell: Callable[[str], str]) -> ChatMessage:
    parts = [part.model_copy(update={"text": spell(part.text)}) for part in message.content]
    thought = spell(message.thought or "")
    return message.model_copy(update={"content": parts, "thought": thought})


def _chat_message(message: ChatMessage, *, in_parts: bool) -> Message:
    """in_parts: True if a placeholder in text would stand for an image or a clip of the row."""
    keys: dict[str, Any] = {}
    if message.tool_calls:
        calls = [call.function for call in message.tool_calls]
        functions = ({"name": call.name, "arguments": call.arguments} for call in calls)
        keys["tool_calls"] = [{"type": "function", "function": f} for f in functions]
    if message.thought:
        keys["reasoning_content"] = message.thought
    if message.name:
        keys["name"] = message.name
    text = _shown(message)
    has_marks = any(mark in text for mark in _PLACEHOLDERS.values())
    if not (in_parts and (message.role == "user" or has_marks)):
        return Message(message.role, text, keys)
    parts = tuple(
        {"type": "text", "text": part.text} if part.type == "text" else {"type": _FIELDS[part.type]}
        for part in message.content
    )
    return Message(message.role, text, keys, parts=parts)


def _shown(message: ChatMessage) -> str:
    return "".join(
        part.text if part.type == "text" else _PLACEHOLDERS[part.type] for part in message.content
    )
