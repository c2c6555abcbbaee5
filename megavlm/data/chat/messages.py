"""Chats read from a column: messages with placeholders for their images, tool calls, and tools.

Messages have the form of transformers and OpenAI, {role, content}, or the form of ShareGPT, {from,
value}; the tool roles of ShareGPT and ms-swift are read, too. Content is text, or parts in the
forms of transformers ({type: image, image | url | path | base64: ...}), of OpenAI ({type:
image_url, image_url: {url: ...}}, and input_text, input_image) and of qwen-vl-utils ({type: video,
video: [FRAME, ...], sample_fps: ...}). A key of a part is either understood or refused.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megavlm.data.media.image_sources import IGNORED

IMAGE_PLACEHOLDER = "<image>"
VIDEO_PLACEHOLDER = "<video>"
AUDIO_PLACEHOLDER = "<audio>"
_PLACEHOLDERS = {
    "image": IMAGE_PLACEHOLDER,
    "video": VIDEO_PLACEHOLDER,
    "audio": AUDIO_PLACEHOLDER,
}

ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {"human": "user", "gpt": "assistant", "observation": "tool", "tool_response": "tool"}
_CALL_ROLES = ("tool_call", "function_call")  # their content is a call, or a list of them, as JSON
_KINDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
_SOURCES = ("bytes", "url", "path", "base64")
# Keys that say whether the message is trained on: OpenAI's name, then ms-swift's.
_TRAINED_KEYS = ("weight", "loss", "loss_scale")


@dataclass(frozen=True)
class Message:
    """A chat message. `text` has a placeholder for each of its images, videos and clips.

    keys: Further keys that the chat template may read, such as tool_calls and reasoning_content.
    is_trained: False for a message of the assistant that SFT does not learn.
    parts: Content as a chat template takes it, {type: text, text: TEXT} and {type: image}. `text`
        is then only shown to people, and a placeholder in it is plain text.
    """

    role: str
    text: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    is_trained: bool = True
    parts: tuple[Mapping[str, str], ...] | None = None


@dataclass(frozen=True)
class Chat:
    """Messages, with the images, videos and clips stored in them, in order and as they are stored.

    num_bare: Number of parts of each kind ("image", "video", "audio") that is in a column.
    """

    messages: tuple[Message, ...]
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    audio: tuple[Any, ...] = ()
    num_bare: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Parts:
    """Images and videos of the messages read so far.

    num_bare: Number of parts of each kind ("image", "video", "audio") that is in a column.
    """

    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    audio: list[Any] = field(default_factory=list)
    num_bare: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Number of images, videos and clips."""
        return len(self.images) + len(self.videos) + len(self.audio) + self.num_bare.total()

    def text(self, content: str | Sequence[Any], where: str) -> str:
        """Return content as text with placeholders, and collect its images and videos.

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
                f"{where} has the part {part!r:.80}; its type must be text, image, video or audio"
            )
        text = given.pop("text") if kind == "text" else self._medium(kind, given, where)
        if given.get("text") == "":
            del given["text"]
        if given:
            raise ValueError(
                f"{where} has a part of type {kind} with the key {next(iter(given))!r}, but "
                "this key is not read; remove it"
            )
        return text

    def _medium(self, kind: str, given: dict[str, Any], where: str) -> str:
        """Collect the image, video or clip of a part, and remove the keys that are read from
        `given`. Returns its placeholder.
        """
        items = {"image": self.images, "video": self.videos, "audio": self.audio}[kind]
        index = given.pop("index", None) if kind == "image" else None
        if index is not None and index != len(items) + self.num_bare[kind]:
            raise ValueError(
                f"{where} has an image part with index={index!r:.80}; images are taken in order"
            )
        names = (*(name for name, of in _KINDS.items() if of == kind), *_SOURCES)
        found = {key: given.pop(key) for key in names if key in given}
        if found:
            item = _item(found, where)
            if kind == "video" and isinstance(item, list):
                rates = [given.pop(key) for key in ("sample_fps", "fps") if key in given]
                item = {"frames": item, "fps": rates[0] if rates else None}
            if kind == "audio" and isinstance(item, Mapping) and "data" in item:
                item = {"base64": item["data"]}  # OpenAI's input_audio
            items.append(item)
        else:
            self.num_bare[kind] += 1
        return _PLACEHOLDERS[kind]


def read_chat(value: Sequence[Any]) -> Chat:
    """Read a list of {role, content}; content is text, or a list of parts.

    Tool calls are in `tool_calls`, as in OpenAI's form, or in a message of the role tool_call or
    function_call. Raises ValueError for anything else.
    """
    messages, parts = _read_messages(value)
    if not any(message.role == "user" for message in messages):
        raise ValueError("the messages have none by the user")
    media = tuple(parts.images), tuple(parts.videos), tuple(parts.audio)
    return Chat(tuple(messages), *media, parts.num_bare)


def read_response(value: Sequence[Any], prompt: Chat) -> Message:
    """Read the assistant's message from a list that only has this message, or a whole chat that
    ends with it after the last messages of `prompt`.

    Raises ValueError for anything else.
    """
    (*before, response), parts = _read_messages(value)
    if response.role != "assistant":
        raise ValueError(f"its last message is by the {response.role}, not by the assistant")
    last = [*map(_shown, prompt.messages[-len(before) :])]
    same = not before or [*map(_shown, before)] == last
    for own, known in (
        (parts.images, prompt.images),
        (parts.videos, prompt.videos),
        (parts.audio, prompt.audio),
    ):
        same &= not own or own == list(known[-len(own) :])
    if not same:
        raise ValueError(
            "its messages before the response are not the prompt's: give only the response, or "
            "after the same messages"
        )
    return response


def _shown(message: Message) -> Message:
    """Return a message without ids of calls and weights, which a model is not shown."""
    calls = [{**call, "id": None} for call in message.keys.get("tool_calls", ())]
    keys = {key: value for key, value in message.keys.items() if key != "tool_call_id"}
    return replace(message, keys={**keys, "tool_calls": calls}, is_trained=True)


def _read_messages(value: Sequence[Any]) -> tuple[list[Message], _Parts]:
    messages, parts = list[Message](), _Parts()
    for number, message in enumerate(value):
        where = f"message {number}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} is {message!r:.80}; it must have a role and content")
        before = parts.count
        read = _message(message, where, parts)
        if read.role == "assistant" and number == len(value) - 1 and parts.count > before:
            raise ValueError(
                f"{where} is the answer, but it has an image, a video or audio: remove that"
            )
        if _role(message) in _CALL_ROLES and messages and messages[-1].role == "assistant":
            messages[-1] = _joined(messages[-1], read)
        else:
            messages.append(read)
    return messages, parts


def read_tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Read a list of tools in OpenAI's form, or a list of their functions; both may be JSON text.

    Raises ValueError for anything else.
    """
    tools = _from_json(value, "tools") if isinstance(value, str) and value.strip() else value
    read = []
    for tool in _listed(tools or []):
        tool = _from_json(tool, "tools") if isinstance(tool, str) else tool
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"a tool is {tool!r:.80}; it must be a function with a name")
        read.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(read)


def without_nulls(value: Any) -> Any:
    """Return the value without keys that are null, at any depth. Arrow adds such keys, because all
    structs of a column share one set of keys.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _role(message: Mapping[str, Any]) -> object:
    return message.get("role", message.get("from"))


def _message(message: Mapping[str, Any], where: str, parts: _Parts) -> Message:
    role, content = _role(message), message.get("content", message.get("value"))
    named = {"role", "content", "from", "value", *_TRAINED_KEYS}
    keys = {k: v for k, v in message.items() if k not in named and v is not None and v != []}
    is_trained = all(_is_trained(message.get(key), key, where) for key in _TRAINED_KEYS)
    if role in _CALL_ROLES:
        calls = _tool_calls(content, where)
        return Message("assistant", "", {**keys, "tool_calls": calls}, is_trained)
    role = _ROLE_NAMES.get(str(role), role)
    if role not in ROLES:
        raise ValueError(f"{where} has the role {role!r}; it must be one of {', '.join(ROLES)}")
    if "tool_calls" in keys:
        if role != "assistant":
            raise ValueError(
                f"{where} by the {role} has tool_calls; only the assistant calls tools"
            )
        keys["tool_calls"] = _tool_calls(keys["tool_calls"], where)
    if content is None and keys.keys() & {"tool_calls", "reasoning_content"}:
        content = ""
    if not isinstance(content, str | list):
        raise ValueError(f"{where} has the content {content!r:.80}; it must be text or parts")
    return Message(str(role), parts.text(content, where), keys, is_trained)


def _is_trained(value: object, key: str, where: str) -> bool:
    if value is not None and value not in (0, 1):
        raise ValueError(f"{where} has {key}={value!r:.80}; it must be 0 (not trained on) or 1")
    return value is None or bool(value)


def _joined(message: Message, calls: Message) -> Message:
    """Return a message of the assistant with the other tool calls of the same turn added."""
    both = [*message.keys.get("tool_calls", ()), *calls.keys["tool_calls"]]
    keys = {**message.keys, **calls.keys, "tool_calls": both}
    return replace(message, keys=keys, is_trained=message.is_trained and calls.is_trained)


def _tool_calls(value: object, where: str) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form, except that arguments are an object, not JSON text: chat
    templates need an object.
    """
    calls = []
    for call in _listed(_from_json(value, where) if isinstance(value, str) else value):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            arguments = _from_json(arguments or "{}", where)
        arguments = {} if arguments is None else arguments
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise ValueError(
                f"{where} has the tool call {call!r:.80}; it must have a name, and arguments that "
                "are an object or its JSON"
            )
        own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        made = {"name": name, "arguments": dict(arguments)}
        calls.append({**own, "type": "function", "function": made})
    return calls


def _listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def without_placeholders(text: str) -> str:
    for mark in (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, AUDIO_PLACEHOLDER):
        text = text.replace(mark, "")
    return text


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: {text!r:.80} is not JSON ({error})") from error


def _present(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a part that have a value and are not ignored."""
    return {k: v for k, v in part.items() if v is not None and k not in IGNORED}


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
