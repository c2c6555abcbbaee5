"""Tool calls in a response, read strictly: a form that a chat server's parser would not accept is
not trained to work here either.

A call is written between <tool_call> and </tool_call>, each on a line of its own, either as a JSON
object with `name` and `arguments` (Qwen2.5-VL, Qwen3-VL), or as tags (Qwen3.5 and later):

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megavlm.environments.base import ChatFormat

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([^<>\s]+)>\n(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n(.*?)\n?</parameter>\s*", re.DOTALL)
_FORMS = {
    "json": 'a JSON object on lines of its own: {"name": NAME, "arguments": {...}}',
    "xml": "<function=NAME>, <parameter=KEY> with its value, </parameter> and </function>, each on "
    "a line of its own",
}


class MalformedCall(ValueError):
    """A tool call that cannot be read. The message tells the policy why."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call. arguments: Values by name, which are all text in the form of tags."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """A response in parts.

    thought: The thought before the text; "" if there is none.
    text: The text without thought and calls.
    calls: The tool calls, in order; an error for each one that is malformed.
    """

    thought: str
    text: str
    calls: tuple[ToolCall | MalformedCall, ...]


def read_reply(response: str, chat: ChatFormat) -> Reply:
    """Split a response into its thought, its text and its tool calls. Calls in a thought are not
    read, because the policy only thinks of them.
    """
    thought, closed, rest = response.rpartition("</think>")
    if not closed and (chat.opens_thought or response.lstrip().startswith("<think>")):
        thought, rest = response, ""  # it was cut in its thought
    thought = thought.strip().removeprefix("<think>").strip()
    text, *blocks = rest.split(_OPEN)
    texts, calls = [text], list[ToolCall | MalformedCall]()
    for block in blocks:
        call, closed, after = block.partition(_CLOSE)
        texts.append(after)
        try:
            if not closed:
                raise MalformedCall(f"{_OPEN} is not closed by {_CLOSE}")
            calls.append(_CALLS[chat.calls](call))
        except MalformedCall as error:
            calls.append(error)
    return Reply(thought, "".join(texts).strip(), tuple(calls))


def _json_call(text: str) -> ToolCall:
    try:
        call = json.loads(_lines(text, "json"))
    except ValueError as error:
        if isinstance(error, MalformedCall):
            raise
        raise MalformedCall(f"the call is not JSON ({error}); write {_FORMS['json']}") from error
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        raise MalformedCall(f"the call has not a name and arguments alone; write {_FORMS['json']}")
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        raise MalformedCall(
            f"the call's name must be text and its arguments an object; write {_FORMS['json']}"
        )
    return ToolCall(call["name"], call["arguments"])


def _tagged_call(text: str) -> ToolCall:
    function = _FUNCTION.fullmatch(_lines(text, "xml"))
    if function is None:
        raise MalformedCall(f"the call is not closed as it is opened; write {_FORMS['xml']}")
    name, body = function.groups()
    arguments, place = dict[str, Any](), 0
    for found in _PARAMETER.finditer(body):
        if found.start() != place or found[1] in arguments:
            break
        arguments[found[1]], place = found[2], found.end()
    if place != len(body):
        raise MalformedCall(
            f"the parameters cannot be read from {body[place:].strip()[:40]!r} on, or one is given "
            f"twice; write {_FORMS['xml']}"
        )
    return ToolCall(name, arguments)


def _lines(text: str, form: str) -> str:
    if not (text.startswith("\n") and text.endswith("\n")):
        raise MalformedCall(
            f"{_OPEN} and {_CLOSE} stand on lines of their own; write {_FORMS[form]}"
        )
    return text.strip()


_CALLS = {"json": _json_call, "xml": _tagged_call}
