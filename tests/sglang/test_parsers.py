"""Tool calls and thoughts are read as SGLang's own parsers read them."""

import json
from typing import Any

import pytest

from megavlm.environments.base import ChatFormat
from megavlm.environments.tools.calls import ToolCall, read_reply

pytestmark = pytest.mark.slow  # the import of SGLang takes longer than the quick tests of the form

SCHEMAS: dict[str, Any] = {
    "text": {"type": "string"},
    "whole": {"type": "integer"},
    "number": {"type": "number"},
    "switch": {"type": "boolean"},
    "box": {"type": "array", "items": {"type": "number"}},
    "object": {"type": "object"},
    "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "perhaps_whole": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
    "either": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "list_of_types": {"type": ["null", "number"]},
    "text_enum": {"enum": ["1", "2"]},
    "whole_enum": {"enum": [1, 2]},
    "mixed_enum": {"enum": [1, "2"]},
    "all_of": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "reference": {"$ref": "#/$defs/Code"},
    "untyped": {},
    "items": {"items": {}},
    "properties": {"properties": {}},
}
VALUES = (
    "1",
    "1.5",
    "1e5",
    "true",
    "null",
    "[1, 2.5]",
    '{"a": [1]}',
    "12.50",
    "a b",
    " 7 ",
    "",
)
QUOTED = ("</think>", "<tool_call>", "a\n</tool_call>\nb", "<think>", "\n", "<", "<function=", "é")
PARAMETERS = {"type": "object", "properties": SCHEMAS}


def parsed(detector: Any, text: str) -> list[tuple[str, Any]]:
    """Return the calls that SGLang streams, with their arguments."""
    from sglang.srt.entrypoints.openai.protocol import Function, Tool

    tools = [Tool(type="function", function=Function(name="note", parameters=PARAMETERS))]
    names, arguments = dict[int, str](), dict[int, str]()
    for piece in text:
        for call in detector.parse_streaming_increment(piece, tools).calls:
            names[call.tool_index] = names.get(call.tool_index) or call.name
            arguments[call.tool_index] = arguments.get(call.tool_index, "") + call.parameters
    return [(names[index], json.loads(arguments[index])) for index in names]


def ours(text: str, form: Any) -> list[tuple[str, Any]]:
    calls = read_reply(text, ChatFormat(form)).calls
    return [(call.name, call.typed(PARAMETERS)) for call in calls if isinstance(call, ToolCall)]


def tags(name: str, value: str) -> str:
    return f"<function=note>\n<parameter={name}>\n{value}\n</parameter>\n</function>"


def test_values_in_tags_have_the_types_that_sglang_gives_them() -> None:
    from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector

    for name in [*SCHEMAS, "unknown"]:
        for value in VALUES:
            if name == "switch" and value not in ("true", "null"):
                continue  # SGLang makes them false; here they are refused
            text = f"<tool_call>\n{tags(name, value)}\n</tool_call>"
            assert ours(text, "xml") == parsed(Qwen3CoderDetector(), text), (name, value)


def test_quoted_marks_are_read_as_sglang_reads_them() -> None:
    from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector
    from sglang.srt.function_call.qwen25_detector import Qwen25Detector

    for value in QUOTED:
        call = json.dumps({"name": "note", "arguments": {"text": value}}, ensure_ascii=False)
        for form, body, detector in (
            ("json", call, Qwen25Detector()),
            ("xml", tags("text", value), Qwen3CoderDetector()),
        ):
            text = f"So.\n<tool_call>\n{body}\n</tool_call>"
            assert ours(text, form) == parsed(detector, text) == [("note", {"text": value})], value


def pairs(name: str, value: str) -> str:
    return f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"


def test_values_in_pairs_are_read_as_sglang_reads_them() -> None:
    from sglang.srt.function_call.glm4_moe_detector import Glm4MoeDetector

    for name, values in {
        "text": ("a b", "", "a\nb", "<think>", "é"),
        "whole": ("1",),
        "number": ("1", "1.5"),
        "switch": ("true", "false"),
        "box": ("[1, 2.5]",),
        "object": ('{"a": [1]}',),
    }.items():
        for value in values:
            text = f"So.\n<tool_call>note\n{pairs(name, value)}</tool_call>"
            assert ours(text, "pairs") == parsed(Glm4MoeDetector(), text), (name, value)
    two = f"<tool_call>note\n{pairs('text', 'a')}{pairs('whole', '1')}</tool_call>"
    both = f"{two}<tool_call>note\n</tool_call>"
    expected = [("note", {"text": "a", "whole": 1}), ("note", {})]
    assert ours(both, "pairs") == parsed(Glm4MoeDetector(), both) == expected


@pytest.mark.parametrize("opens", [False, True])
def test_a_thought_ends_where_it_ends_for_sglang(opens: bool) -> None:
    from sglang.srt.parser.reasoning_parser import Qwen3Detector

    for text in (
        "a </think> b </think> c",
        "a",
        "<think>a</think>b</think>c",
        "So <think>a</think>b",
        "<think>a",
    ):
        read = read_reply(text, ChatFormat(opens_thought=opens))
        found = Qwen3Detector(force_reasoning=opens).detect_and_parse(text)
        assert read.thought == found.reasoning_text.strip(), text
        assert read.answer == found.normal_text.strip(), text
