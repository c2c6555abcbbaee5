"""Thoughts and tool calls in a response, read as strictly as the parsers of SGLang or more: a form
that a chat server does not accept is not trained to work here either.

A call is written between <tool_call> and </tool_call>, each on a line of its own, either as a JSON
object with `name` and `arguments` (Qwen2.5-VL, Qwen3-VL), or as tags (Qwen3.5 and later):

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

In a third form, of keys and values (GLM-4.5 and later), the name follows <tool_call> on its line:

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

A call is read from its beginning on, so that its arguments may quote any of these marks that its
own form does not end them by.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megavlm.environments.base import ChatFormat
from megavlm.environments.tools.schemas import properties, strict_json, typed

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# In the middle of a sentence, <tool_call> is a word.
_CALL = re.compile(rf"{_OPEN}(?=\s*(?:\n|\{{|<function=|\Z))")
_NAMED_CALL = re.compile(rf"{_OPEN}(?=[^\s<>]*\s*(?:\n|\{{|<arg_key>|\Z))")
_SPACE = re.compile(r"\s*")
_JSON_END = re.compile(rf"\s*\n{_CLOSE}")
_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>\n")
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n")
# SGLang ends a value at each of them.
_VALUE_END = re.compile(r"</parameter>|<parameter=|</function>")
_FUNCTION_END = re.compile(rf"</function>\s*\n{_CLOSE}")
_NAME = re.compile(r"([^\s<>]+)[ \t]*\n\s*")
_KEY = re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>")
# SGLang ends a call at each </tool_call>, within a value too.
_ARG_END = re.compile(rf"</arg_value>\s*|{_CLOSE}")
_FORMS = {
    "json": 'a JSON object on lines of its own: {"name": NAME, "arguments": {...}}',
    "xml": "<function=NAME>, <parameter=KEY> with its value, </parameter> and </function>, each on "
    "a line of its own",
    "pairs": f"the name behind {_OPEN}, on the next lines <arg_key>KEY</arg_key> and "
    f"<arg_value>VALUE</arg_value> for each argument, then {_CLOSE}",
}
_LINES = f"{_OPEN} and {_CLOSE} stand on lines of their own; write "


class MalformedCall(ValueError):
    """A tool call that cannot be read. The message tells the policy why."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call.

    arguments: Values by name, as they are written. has_types: False in the forms of tags and of
        pairs, where all values are text.
    """

    name: str
    arguments: Mapping[str, Any]
    has_types: bool = True

    def typed(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments, with the types that a schema gives to values that are text. In JSON
        values have their types.

        parameters: JSON schema of the tool's parameters. Raises MalformedCall for a text that has
        no value of its type.
        """
        if self.has_types:
            return dict(self.arguments)
        known, values = properties(parameters), dict[str, Any]()
        for name, text in self.arguments.items():
            try:
                values[name] = typed(text, known.get(name))
            except ValueError as error:
                raise MalformedCall(f"{self.name}: {name}: {error}") from error
        return values


@dataclass(frozen=True)
class Reply:
    """A response in parts.

    thought: The thought before the text; "" if there is none.
    answer: The response without the thought.
    text: The answer without calls.
    calls: The tool calls, in order; an error for each one that is malformed.
    """

    thought: str
    answer: str
    text: str
    calls: tuple[ToolCall | MalformedCall, ...]


def read_reply(response: str, chat: ChatFormat) -> Reply:
    """Split a response into its thought, its text and its tool calls. Calls in a thought are not
    read, because the policy only thinks of them.
    """
    thought, answer = _split_thought(response, chat.opens_thought)
    call: ToolCall | MalformedCall
    texts, calls, place = list[str](), list[ToolCall | MalformedCall](), 0
    has_lines = chat.calls != "pairs"
    opening = _CALL if has_lines else _NAMED_CALL
    while mark := opening.search(answer, place):
        texts.append(answer[place : mark.start()])
        try:
            if has_lines and not answer.startswith("\n", mark.end()):
                raise MalformedCall(_LINES + _FORMS[chat.calls])
            call, place = _CALLS[chat.calls](answer, mark.end())
        except MalformedCall as error:
            call, place = _malformed(answer, mark.end(), chat.calls, error)
        calls.append(call)
    texts.append(answer[place:])
    return Reply(thought, answer.strip(), "".join(texts).strip(), tuple(calls))


def _split_thought(response: str, opens_thought: bool) -> tuple[str, str]:
    """Return the thought and the rest. A thought begins in the prompt or by <think>, and ends at
    the first </think>, as for SGLang; a </think> without a thought is text.
    """
    before, closed, rest = response.partition("</think>")
    begins = opens_thought or response.lstrip().startswith("<think>")
    if not begins and not (closed and "<think>" in _CALL.split(before, maxsplit=1)[0]):
        return "", response
    return before.strip().removeprefix("<think>").strip(), rest  # no rest: cut in its thought


def _json_call(text: str, start: int) -> tuple[ToolCall, int]:
    """Read the call that begins at `start`, and return it with its end."""
    try:
        call, end = strict_json.raw_decode(text, _after_space(text, start))
        if (closed := _JSON_END.match(text, end)) is None:
            raise json.JSONDecodeError("it goes on", text, _after_space(text, end))
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at {_line(text, error.pos)!r}"
        raise MalformedCall(f"the call is not JSON ({reason}); write {_FORMS['json']}") from error
    except (ValueError, RecursionError) as error:  # NaN, a number of 5,000 digits, deep nesting
        raise MalformedCall(f"the call is not JSON ({error}); write {_FORMS['json']}") from error
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        raise MalformedCall(
            f"the call must have a name and arguments, and nothing else; write {_FORMS['json']}"
        )
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        raise MalformedCall(
            f"the call's name must be text and its arguments an object; write {_FORMS['json']}"
        )
    return ToolCall(call["name"], call["arguments"]), closed.end()


def _tagged_call(text: str, start: int) -> tuple[ToolCall, int]:
    """Read the call that begins at `start`, and return it with its end."""
    if (function := _FUNCTION.match(text, start)) is None:
        raise MalformedCall(f"the call is not closed as it is opened; write {_FORMS['xml']}")
    arguments, place = dict[str, Any](), function.end()
    while parameter := _PARAMETER.match(text, place):
        end = _VALUE_END.search(text, parameter.end())
        if parameter[1] in arguments or end is None or end[0] != "</parameter>":
            break
        arguments[parameter[1]] = text[parameter.end() : end.start()].removesuffix("\n")
        place = _after_space(text, end.end())
    if (closed := _FUNCTION_END.match(text, place)) is None:
        if text.startswith(_CLOSE, place):
            raise MalformedCall(f"the call is not closed as it is opened; write {_FORMS['xml']}")
        raise MalformedCall(
            f"the parameters cannot be read from {_line(text, place)!r} on, or one is given "
            f"twice; write {_FORMS['xml']}"
        )
    return ToolCall(function[1], arguments, has_types=False), closed.end()


def _paired_call(text: str, start: int) -> tuple[ToolCall, int]:
    """Read the call that begins at `start`, and return it with its end."""
    if (name := _NAME.match(text, start)) is None:
        raise MalformedCall(f"the call has no name on its first line; write {_FORMS['pairs']}")
    arguments, place = dict[str, Any](), name.end()
    while key := _KEY.match(text, place):
        end, word = _ARG_END.search(text, key.end()), key[1].strip()
        if word in arguments or end is None or end[0] == _CLOSE:
            break
        arguments[word] = text[key.end() : end.start()]
        place = end.end()
    if not text.startswith(_CLOSE, place):
        raise MalformedCall(
            f"the arguments cannot be read from {_line(text, place)!r} on, or one is given twice; "
            f"write {_FORMS['pairs']}"
        )
    return ToolCall(name[1], arguments, has_types=False), place + len(_CLOSE)


def _line(text: str, start: int) -> str:
    return text[start : start + 40].strip().partition("\n")[0]


def _after_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    assert space is not None
    return space.end()


def _malformed(text: str, start: int, form: str, error: MalformedCall) -> tuple[MalformedCall, int]:
    """Return the error of a call that cannot be read, and the end of the call."""
    following = (_NAMED_CALL if form == "pairs" else _CALL).search(text, start)
    most = following.start() if following else len(text)
    if (end := text.find(_CLOSE, start, most)) < 0:
        return MalformedCall(f"{_OPEN} is not closed by {_CLOSE}"), most
    if form != "pairs" and text[end - 1] != "\n":
        error = MalformedCall(_LINES + _FORMS[form])
    return error, end + len(_CLOSE)


_CALLS: Mapping[str, Callable[[str, int], tuple[ToolCall, int]]]
_CALLS = {"json": _json_call, "xml": _tagged_call, "pairs": _paired_call}
