"""Tools of a policy: schemas from functions, calls in responses, and episodes that call them."""

import asyncio
import json
import time
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from megavlm.environments.base import ChatFormat, Context, Image, Observation, Step
from megavlm.environments.tools.calls import MalformedCall, ToolCall, read_reply
from megavlm.environments.tools.environment import ToolEnvironment
from megavlm.environments.tools.load import load_tools
from megavlm.environments.tools.tool import Tool, ToolError, tool
from megavlm.rewards.base import Example, Score
from tests.support.timeouts import scaled

JSON, XML = ChatFormat("json"), ChatFormat("xml")
LINES = "a\nb"
ROW = Example("<image>What is there?", "a car", images=(b"image",))


def json_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def xml_call(name: str, **arguments: Any) -> str:
    given = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        (JSON, f"I look.\n{json_call('look', box=[1, 2])}\n{json_call('mark', text=LINES)}"),
        (XML, f"I look.\n\n{xml_call('look', box='[1, 2]')}\n{xml_call('mark', text=LINES)}"),
    ],
)
def test_calls_in_each_form(chat: ChatFormat, text: str) -> None:
    reply = read_reply(text, chat)
    box = [1, 2] if chat is JSON else "[1, 2]"
    assert reply.calls == (ToolCall("look", {"box": box}), ToolCall("mark", {"text": "a\nb"}))
    assert (reply.thought, reply.text) == ("", "I look.")


@pytest.mark.parametrize(
    ("chat", "response", "thought", "text", "calls"),
    [
        (JSON, f"<think>\n{json_call('a')}\n</think>\n\nno", json_call("a"), "no", 0),
        (ChatFormat("xml", True), f"hm {xml_call('a')}\n</think>\n\n{xml_call('b')}", None, "", 1),
        (ChatFormat("xml", True), f"hm {xml_call('a')}", None, "", 0),  # cut in its thought
        (JSON, f"<think>\nhm {json_call('a')}", None, "", 0),
        (JSON, "a </think> b", "a", "b", 0),
    ],
)
def test_calls_in_a_thought_are_thoughts(
    chat: ChatFormat, response: str, thought: str | None, text: str, calls: int
) -> None:
    reply = read_reply(response, chat)
    assert (reply.text, len(reply.calls)) == (text, calls)
    assert thought is None or reply.thought == thought


@pytest.mark.parametrize(
    ("chat", "call", "problem"),
    [
        (JSON, '<tool_call>\n{"name": "a", "arguments": {}}', "is not closed"),
        (JSON, '<tool_call>{"name": "a", "arguments": {}}</tool_call>', "on lines of their own"),
        (JSON, "<tool_call>\n{'name': 'a'}\n</tool_call>", "is not JSON"),
        (JSON, '<tool_call>\n{"name": "a"}\n</tool_call>', "not a name and arguments alone"),
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


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ({"query": "7"}, "7 3 web None False"),
        ({"query": "a", "most": "4", "area": "[1, 2]", "title": "True"}, "a 4 web (1.0, 2.0) True"),
        ({"query": "[1]", "kind": "image", "title": True}, "[1] 3 image None True"),
    ],
)
def test_arguments_are_read_by_their_types(arguments: dict[str, Any], result: str) -> None:
    assert call(search, arguments) == result


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


def pair(numbers: list[int]) -> Any:
    """Return what is asked for."""
    kinds: list[Any] = ["text", Image(b"1"), [Image(b"2"), "text", 3], {"a": [1]}, ("a", 1)]
    return kinds[numbers[0]]


@pytest.mark.parametrize(
    ("number", "content"),
    [
        (0, "text"),
        (1, [Image(b"1")]),
        (2, [Image(b"2"), "text", "3"]),
        (3, '{"a": [1]}'),
        (4, '["a", 1]'),
    ],
)
def test_results_become_content(number: int, content: Any) -> None:
    assert call(pair, {"numbers": [number]}) == content


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
        with pytest.raises(ValueError, match=f"environment.tools: .*{problem}"):
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
