"""Tools in the text of a chat, for templates that know none: Qwen2-VL's and Qwen2.5-VL's.

The form is Hermes', on which Qwen2.5's text models were trained; SGLang's parser `qwen25` reads it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_DEFAULT_SYSTEM = "You are a helpful assistant."  # that both templates add themselves


def with_tools_as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages with their tools in the system message, tool calls in the assistant's text,
    and the results of tools as messages of the user.
    """
    written: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            parts = _response(message["content"])
            if number and messages[number - 1]["role"] == "tool":
                written[-1]["content"] += [_text("\n"), *parts]
            else:
                written.append({"role": "user", "content": parts})
        elif calls := message.get("tool_calls"):
            written.append(_called(message, calls))
        else:
            written.append(message)
    if not tools:
        return written
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    system: str | Sequence[dict[str, str]] = _DEFAULT_SYSTEM
    if written[0]["role"] == "system":
        system = written.pop(0)["content"]
    text = f"\n\n{_BEFORE}{listed}{_AFTER}"
    return [{"role": "system", "content": _followed(system, text)}, *written]


def _response(content: str | Sequence[dict[str, str]]) -> list[dict[str, str]]:
    parts = [_text(content)] if isinstance(content, str) else list(content)
    return [_text("<tool_response>\n"), *parts, _text("\n</tool_response>")]


def _called(message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts = [""] if message["content"] else []
    for call in calls:
        function = call["function"]
        named = {"name": function["name"], "arguments": function["arguments"]}
        texts.append(f"<tool_call>\n{json.dumps(named, ensure_ascii=False)}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": _followed(message["content"], "\n".join(texts))}


def _followed(content: str | Sequence[dict[str, str]], text: str) -> str | list[dict[str, str]]:
    return content + text if isinstance(content, str) else [*content, _text(text)]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
