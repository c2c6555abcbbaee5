"""Tools of a policy: schemas from functions, calls in responses, and episodes that call them."""

import asyncio
import json
import time
from dataclasses import dataclass, replace
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from PIL import Image as Picture
from pydantic import BaseModel, Field

from megavlm.environments.base import ChatFormat, Context, Image, Observation, Step
from megavlm.environments.tools.calls import MalformedCall, Reply, ToolCall, read_reply
from megavlm.environments.tools.environment import ToolEnvironment
from megavlm.environments.tools.load import load_tools
from megavlm.environments.tools.tool import Tool, ToolError, tool
from megavlm.rewards.base import Example, Score
from tests.support.timeouts import scaled

JSON, XML, PAIRS = ChatFormat("json"), ChatFormat("xml"), ChatFormat("pairs")
LINES = "a\nb"
ROW = Example("<image>What is there?", "a car", images=(b"image",))


def json_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def xml_call(name: str, **arguments: Any) -> str:
    given = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def paired_call(name: str, **arguments: Any) -> str:
    pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        (PAIRS, f"I look.\n{paired_call('look', box='[1, 2]')}{paired_call('mark', text=LINES)}"),
        (JSON, f"I look.\n{json_call('look', box=[1, 2])}\n{json_call('mark', text=LINES)}"),
        (XML, f"I look.\n\n{xml_call('look', box='[1, 2]')}\n{xml_call('mark', text=LINES)}"),
    ],
)
def test_calls_in_each_form(chat: ChatFormat, text: str) -> None:
    reply = read_reply(text, chat)
    box = [1, 2] if chat is JSON else "[1, 2]"
    typed = chat is JSON
    assert reply.calls == (
        ToolCall("look", {"box": box}, typed),
        ToolCall("mark", {"text": "a\nb"}, typed),
    )
    assert (reply.thought, reply.text) == ("", "I look.")


@pytest.mark.parametrize(
    ("chat", "response", "thought", "text", "calls"),
    [
        (JSON, f"<think>\n{json_call('a')}\n</think>\n\nno", json_call("a"), "no", 0),
        (ChatFormat("xml", True), f"hm {xml_call('a')}\n</think>\n\n{xml_call('b')}", None, "", 1),
        (ChatFormat("xml", True), f"hm {xml_call('a')}", None, "", 0),  # cut in its thought
        (JSON, f"<think>\nhm {json_call('a')}", None, "", 0),
        (JSON, "a </think> b", "", "a </think> b", 0),  # no thought has begun
        (ChatFormat("xml", True), "a </think> b </think> c", "a", "b </think> c", 0),
        (PAIRS, f"\n<think>{paired_call('a')}</think>\n{paired_call('b')}", None, "", 1),
        (JSON, f"So <think>{json_call('a')}</think> b", None, "b", 0),
    ],
)
def test_calls_in_a_thought_are_thoughts(
    chat: ChatFormat, response: str, thought: str | None, text: str, calls: int
) -> None:
    reply = read_reply(response, chat)
    assert (reply.text, len(reply.calls)) == (text, calls)
    assert thought is None or reply.thought == thought


QUOTED = (
    "write </think> here",
    "<think>\nno\n</think>",
    "<tool_call>",
    "</tool_call>",
    json_call("b"),
    xml_call("b"),
    "</parameter>\n</function>\n</tool_call>",
)


@pytest.mark.parametrize("text", QUOTED)
@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
@pytest.mark.parametrize("chat", [JSON, XML])
def test_an_argument_may_quote_the_marks_of_calls_and_thoughts(
    chat: ChatFormat, thought: str, text: str
) -> None:
    call = json_call if chat is JSON else xml_call
    reply = read_reply(f"{thought}I write.\n{call('note', text=text)}\nSo.", chat)
    if chat is XML and "</function>" in text:  # it ends a value, for SGLang's parser too
        assert reply.calls[0] != ToolCall("note", {"text": text}, False)
        return
    if not thought and text.startswith("<think>"):
        assert reply.calls, "SGLang's parser takes it for a thought"
        return
    assert reply.calls == (ToolCall("note", {"text": text}, chat is JSON),)
    assert (reply.thought, reply.text) == ("hm" if thought else "", "I write.\n\nSo.")


def test_a_mark_in_a_sentence_is_a_word() -> None:
    said = "It opens by <tool_call>, and </tool_call> closes it."
    assert read_reply(said, JSON) == read_reply(said, PAIRS) == Reply("", said, said, ())
    reply = read_reply(f"{said}\n{json_call('a')}", JSON)
    assert (reply.text, reply.calls) == (said, (ToolCall("a", {}),))


@pytest.mark.parametrize(
    ("chat", "call", "problem"),
    [
        (JSON, '<tool_call>\n{"name": "a", "arguments": {"b": ' + "[" * 9999, "is not closed"),
        (JSON, f"<tool_call>\n{'[' * 9999}\n</tool_call>", "is not JSON"),
        (JSON, '<tool_call>\n{"name": "a", "arguments": {"b": NaN}}\n</tool_call>', "NaN"),
        (JSON, '<tool_call>\n{"name": "a", "arguments": {}} b\n</tool_call>', "goes on at 'b"),
        (JSON, '<tool_call>\n{"name": "a", "arguments": {}}', "is not closed"),
        (JSON, '<tool_call>{"name": "a", "arguments": {}}</tool_call>', "on lines of their own"),
        (JSON, "<tool_call>\n{'name': 'a'}\n</tool_call>", "is not JSON"),
        (JSON, '<tool_call>\n{"name": "a"}\n</tool_call>', "must have a name and arguments"),
        (JSON, '<tool_call>\n{"name": "a", "arguments": []}\n</tool_call>', "an object"),
        (JSON, xml_call("a"), "is not JSON"),
        (XML, json_call("a"), "not closed as it is opened"),
        (XML, "<tool_call>\n<function=a>\n</tool_call>", "not closed as it is opened"),
        (XML, "<tool_call>\n<function=a>\n<parameter=b>\n1\n</function>\n</tool_call>", "'<param"),
        (XML, "<tool_call>\n<function=a>\nb\n</function>\n</tool_call>", "from 'b' on"),
        (
            XML,
            "<tool_call>\n<function=a>\n<parameter=b>\n1\n</parameter>\n<parameter=b>\n2\n"
            "</parameter>\n</function>\n</tool_call>",
            "given twice",
        ),
        (PAIRS, json_call("a"), "no name on its first line"),
        (PAIRS, paired_call("", b=1), "no name on its first line"),
        (
            PAIRS,
            "<tool_call>a\n<arg_key>b</arg_key>\n</tool_call>",
            "from '<arg_key>b</arg_key>' on",
        ),
        (PAIRS, paired_call("a", b="1").replace("</tool_call>", ""), "is not closed"),
        (PAIRS, paired_call("a", b="</tool_call>"), "from '<arg_key>b"),
        (
            PAIRS,
            paired_call("a", b=1).replace("</tool_call>", paired_call("", b=1)[12:]),
            "given tw",
        ),
    ],
)
def test_a_malformed_call_says_what_is_wrong(chat: ChatFormat, call: str, problem: str) -> None:
    (found,) = read_reply(call, chat).calls
    assert isinstance(found, MalformedCall) and problem in str(found)


def search(
    query: str,
    most: int = 3,
    kind: Literal["web", "image"] = "web",
    area: Annotated[tuple[float, float] | None, Field(description="Where")] = None,
    title: bool = False,
) -> str:
    """Search for a text."""
    return f"{query} {most} {kind} {area} {title}"


def test_the_schema_of_a_function_is_made_from_its_types() -> None:
    schema = Tool.of(search).schema
    assert (schema["name"], schema["description"]) == ("search", "Search for a text.")
    properties = schema["parameters"]["properties"]
    assert properties["query"] == {"type": "string"}
    assert properties["most"] == {"type": "integer", "default": 3}
    assert properties["kind"] == {"type": "string", "enum": ["web", "image"], "default": "web"}
    assert properties["title"] == {"type": "boolean", "default": False}, "a name is no title"
    assert properties["area"]["description"] == "Where"
    assert schema["parameters"]["required"] == ["query"]


def call(function: Any, arguments: dict[str, Any], seconds: float = 5.0) -> Any:
    return asyncio.run(Tool.of(function).call(arguments, seconds))


class Side(Enum):
    LEFT = "1"
    RIGHT = "2"


class Box(BaseModel):
    width: int
    inner: "Box | None" = None


def told(
    code: str | None = None,
    side: Side | None = None,
    value: Any = None,
    many: list[int] | None = None,
    most: int = 3,
    share: float = 0.5,
    title: bool = False,
    box: Box | None = None,
    kind: Literal["1", "2"] = "1",
) -> str:
    """Tell the arguments."""
    return repr((code, side, value, many, most, share, title, box, kind))


BARE: dict[str, Any] = {
    "code": None,
    "side": None,
    "value": None,
    "many": None,
    "most": 3,
    "share": 0.5,
    "title": False,
    "box": None,
    "kind": "1",
}
TEXTS = ("1e5", "true", "[1]", "12.50", '{"a": 1}', " 1 ")


@pytest.mark.parametrize(
    ("chat", "arguments", "given"),
    [
        *((JSON, {name: text}, {}) for text in (*TEXTS, "null") for name in ("code", "value")),
        *((XML, {name: text}, {}) for text in TEXTS for name in ("code", "value")),
        *((chat, {"side": "2"}, {"side": Side.RIGHT}) for chat in (JSON, XML)),
        *((chat, {"kind": "2"}, {}) for chat in (JSON, XML)),
        (XML, {"code": "null", "value": "None"}, {"code": None}),
        (XML, {"many": "[1, 2]", "most": "4"}, {"many": [1, 2], "most": 4}),
        (XML, {"share": "2", "title": "True"}, {"share": 2.0, "title": True}),
        (XML, {"box": '{"width": 2}'}, {"box": Box(width=2)}),
        (
            JSON,
            {"box": {"width": 2, "inner": {"width": 1}}},
            {"box": Box(width=2, inner=Box(width=1))},
        ),
    ],
)
def test_a_tool_gets_the_arguments_as_they_are_written(
    chat: ChatFormat, arguments: dict[str, Any], given: dict[str, Any]
) -> None:
    environment, _ = looking(chat=chat, tools=[Tool.of(told)])
    turn = step(environment, (json_call if chat is JSON else xml_call)("told", **arguments))
    assert turn.observation is not None
    said = repr(tuple((BARE | arguments | given).values()))
    assert turn.observation.messages[0]["content"] == said


def test_a_boolean_that_is_none_is_refused() -> None:
    environment, _ = looking(chat=XML, tools=[Tool.of(told)])
    turn = step(environment, xml_call("told", title="yes"))
    assert turn.observation is not None
    assert turn.observation.messages[0]["content"] == (
        "error: told: title: 'yes' is neither true nor false"
    )


def test_a_schema_has_its_definitions_in_place() -> None:
    parameters = Tool.of(told).schema["parameters"]
    assert parameters["properties"]["side"] == {
        "anyOf": [{"enum": ["1", "2"], "type": "string"}, {"type": "null"}],
        "default": None,
    }
    box = parameters["properties"]["box"]["anyOf"][0]
    assert box["properties"]["inner"]["anyOf"][0] == {"$ref": "#/$defs/Box"}, "it holds itself"
    assert parameters["$defs"]["Box"]["properties"]["inner"]["anyOf"][0] == {"$ref": "#/$defs/Box"}


def slow(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


async def lost(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        (search, {}, "search: query: Missing required argument"),
        (search, {"query": "a", "most": "many"}, "search: most: Input should be a valid integer"),
        (search, {"query": "a", "kind": "text"}, "search: kind: Input should be 'web' or 'image'"),
        (search, {"query": "a", "limit": 1}, "search: limit: Unexpected keyword argument"),
        (slow, {"seconds": 1.0}, "slow: no result in 0.2 s"),
        (lost, {"seconds": 1.0}, "lost: no result in 0.2 s"),
        (lost, {"seconds": 0.0}, "lost: 'lost'"),
    ],
)
def test_a_call_that_fails_is_one_sentence(
    function: Any, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ToolError) as caught:
        call(function, arguments, 0.2 if "no result" in problem else scaled(30))
    assert str(caught.value).startswith(problem)


PICTURE = Picture.new("RGB", (40, 32), "red")
SHOWN = Image.of(PICTURE)
ARRAY = np.asarray(PICTURE)


@dataclass
class Odd:
    picture: Any


RESULTS: list[tuple[Any, Any]] = [
    ("text", "text"),
    (Image(b"1"), [Image(b"1")]),
    ([Image(b"2"), "text", 3], [Image(b"2"), "text", "3"]),
    ({"a": [1]}, '{"a": [1]}'),
    (("a", 1), '["a", 1]'),
    (None, "null"),
    (PICTURE, [SHOWN]),
    (PICTURE.convert("CMYK"), [SHOWN]),
    (ARRAY, [SHOWN]),
    (ARRAY[:, :, 0], [Image.of(ARRAY[:, :, 0])]),
    (SHOWN.data, [SHOWN]),
    (
        ["A crop:", PICTURE, ARRAY, SHOWN.data, {"b": 1}],
        ["A crop:", SHOWN, SHOWN, SHOWN, '{"b": 1}'],
    ),
    ({"crop": PICTURE, "at": (1, 2)}, [SHOWN, '{"crop": "image 1", "at": [1, 2]}']),
    (np.arange(3), "[0, 1, 2]"),
    ({"mean": np.float32(0.5), "day": date(2026, 1, 2)}, '{"mean": 0.5, "day": "2026-01-02"}'),
    (Side.LEFT, "1"),
    (b"as text", "as text"),
]


def given(number: int) -> Any:
    """Return what is asked for."""
    return [
        *(result for result, _ in RESULTS),
        object(),
        b"\xff\x00",
        {"a": [object()]},
        Odd(PICTURE),
    ][number]


@pytest.mark.parametrize(("number", "content"), [*enumerate(shown for _, shown in RESULTS)])
def test_results_become_content(number: int, content: Any) -> None:
    assert call(given, {"number": number}) == content


@pytest.mark.parametrize("number", range(len(RESULTS), len(RESULTS) + 4))
def test_a_result_that_cannot_be_shown_is_a_failure_of_its_call(number: int) -> None:
    with pytest.raises(ToolError, match=r"given: .*(serializ|utf-8)"):
        call(given, {"number": number})


def untyped(a) -> str:  # type: ignore[no-untyped-def]
    """Say it."""
    return str(a)


def silent(a: int) -> str:
    return str(a)


def strange(a: Context) -> str:
    """Say it."""
    return str(a)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (untyped, "the tool untyped has no type for its argument a"),
        (silent, "the tool silent has no docstring"),
        (strange, "the tool strange has a type without a schema"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_one_sentence(function: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Tool.of(function)


def test_tools_are_imported_by_their_paths() -> None:
    here = __name__
    assert [found.name for found in load_tools([f"{here}:search", f"{here}:slow"]).functions] == [
        "search",
        "slow",
    ]
    for path, problem in (
        ("nowhere:tool", "nowhere:tool cannot be imported"),
        (f"{here}:nothing", "nothing cannot be imported"),
        (f"{here}:ROW", "is not a function"),
    ):
        with pytest.raises(ValueError, match=f"environment.tools.*{problem}"):
            load_tools([path])
    with pytest.raises(ValueError, match="two tools named search"):
        load_tools([f"{here}:search"] * 2)


class Looking(ToolEnvironment):
    @tool
    async def look(self, box: tuple[int, int]) -> list[Any]:
        """Look at a place."""
        return [f"at {box}", Image(b"crop")]

    @tool
    def ask(self, question: str) -> str:
        """Ask the row."""
        if question == "bad":
            raise ToolError("no such question")
        return f"{self.row.answer} for {question}"


async def score(text: str, row: Example) -> Score:
    return Score(float(row.answer in text), row.answer in text)


def looking(max_turns: int = 9, **context: Any) -> tuple[Looking, Observation]:
    environment = Looking(Context(score, max_turns, **context))
    return environment, asyncio.run(environment.reset(ROW, 0))


def step(environment: Looking, text: str) -> Step:
    return asyncio.run(environment.step(text))


def test_an_episode_calls_tools_until_it_answers() -> None:
    environment, shown = looking(chat=XML, tools=[Tool.of(search)])
    assert (shown.messages, shown.images) == (ROW.messages, ROW.images)
    names = [schema["function"]["name"] for schema in shown.tools]
    assert names == ["look", "ask", "search"]
    calls = [
        xml_call("look", box="[1, 2]"),
        xml_call("ask", question="bad"),
        xml_call("find"),
        "<tool_call>\n</tool_call>",
        xml_call("search", query="a car"),
    ]
    turn = step(environment, "\n".join(calls))
    assert not turn.done and turn.observation is not None
    messages = turn.observation.messages
    assert [message["role"] for message in messages] == ["tool"] * 5
    assert messages[0]["content"] == ["at (1, 2)", Image(b"crop")]
    assert messages[1]["content"] == "error: no such question"
    assert messages[2]["content"] == "error: there is no tool find; there is look, ask, search"
    assert messages[3]["content"].startswith("error: the call is not closed as it is opened")
    assert messages[4]["content"] == "a car 3 web None False"
    assert turn.info["counts"] == {"tool_calls": 5, "tool_errors": 3}
    done = step(environment, "a car")
    assert (done.done, done.reward) == (True, 1.0)


def test_environments_of_a_class_share_their_tools_but_not_themselves() -> None:
    """Pydantic needs a millisecond for a tool, which thousands of episodes would pay."""
    first, second = looking()[0], looking()[0]
    second.row = replace(ROW, answer="a bus")
    for one, other in zip(first.tools, second.tools, strict=True):
        assert one.schema is other.schema
    said = [
        asyncio.run(environment.tools[1].call({"question": "it"}, 9.0))
        for environment in (first, second)
    ]
    assert said == ["a car for it", "a bus for it"]
    with pytest.raises(ToolError, match="ask: "):
        asyncio.run(first.tools[1].call({"question": "it", "self": second}, 9.0))


async def waiting(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "awake"


def test_the_calls_of_a_turn_share_its_time() -> None:
    """Together they would take longer than the step may, which would end the episode."""
    environment, _ = looking(tools=[Tool.of(waiting)], tool_timeout=scaled(1.0))
    calls = [json_call("waiting", seconds=seconds) for seconds in (0, 1000, 1000, 1000)]
    turn = step(environment, "\n".join(calls))
    assert turn.observation is not None and turn.info["counts"]["tool_errors"] == 3
    contents = [message["content"] for message in turn.observation.messages]
    assert contents[0] == "awake" and contents[1].startswith("error: waiting: no result in ")
    assert contents[2:] == ["error: waiting: no result in 0 s"] * 2


def test_the_last_turn_is_the_answer_and_calls_nothing() -> None:
    environment, _ = looking(max_turns=1)
    done = step(environment, json_call("look", box=[1, 2]))
    assert (done.done, done.reward) == (True, 0.0)
