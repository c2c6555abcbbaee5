"""Tools of real MCP servers, called by episodes in real processes."""

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

from megavlm.environments.adapters import mcp
from megavlm.environments.base import Image, Observation
from megavlm.environments.processes import EnvironmentPool
from megavlm.environments.tools.tool import ToolError
from megavlm.subprocess_pool.failure import CallFailure
from tests.support.timeouts import scaled
from tests.unit.environments.adapters.played import (
    ROW,
    USER,
    children,
    ended,
    gone,
    opened,
    parts,
    pixels,
    play,
    pool,
    refused,
    serves,
)

COMMAND = f"{sys.executable} {USER / 'mcp_server.py'}"
FAILURE = "error: fail: Error executing tool fail: no luck"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serves([*COMMAND.split(), "{port}"]) as found:
        yield f"{found}/mcp"


@pytest.fixture(params=["http", pytest.param("stdio", marks=pytest.mark.slow)])
def address(request: pytest.FixtureRequest) -> str:
    return COMMAND if request.param == "stdio" else str(request.getfixturevalue("url"))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def result(session: Any, name: str, **arguments: Any) -> Any:
    step = await session.step(call(name, **arguments))
    return parts(step.observation)


def test_a_policy_sees_and_calls_the_tools_of_a_server(address: str) -> None:
    async def steps(session: Any, shown: Observation) -> None:
        schemas = {tool["function"]["name"]: tool["function"] for tool in shown.tools}
        assert schemas["add"] == {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "type": "object",
            },
        }
        assert await result(session, "add", a=1, b=2) == "3"
        assert await result(session, "measure") == '{"height_cm": 181.5}'
        several = await session.step(call("add", a=2, b=2) + call("picture", shade=9))
        assert [message["name"] for message in several.observation.messages] == ["add", "picture"]
        before, image, after = parts(several.observation)
        assert (before, after) == ("before", "after") and isinstance(image, Image)
        (picture,) = pixels(several.observation)
        assert picture.shape == (30, 40, 3) and picture[0, 0].tolist() == [9, 0, 0]
        last = await session.step("The answer is 3.")
        assert last.done and last.reward == 0

    play("tools", steps, tools=(address,))


HEIGHT = {"height_cm": 181.5}
PNG = Image.of(np.zeros((40, 40, 3), np.uint8))
IN_TEXT = base64.b64encode(PNG.data).decode()


def text(said: str) -> TextContent:
    return TextContent(type="text", text=said)


def file(kind: str, data: str) -> EmbeddedResource:
    contents = BlobResourceContents(uri="file:///a", mime_type=kind, blob=data)
    return EmbeddedResource(type="resource", resource=contents)


@pytest.mark.parametrize(
    ("content", "structured", "seen"),
    [
        ([], HEIGHT, '{"height_cm": 181.5}'),
        ([], None, ""),
        ([], {"result": []}, '{"result": []}'),
        ([text('{ "height_cm": 181.5 }')], HEIGHT, '{ "height_cm": 181.5 }'),
        ([text("3")], {"result": 3}, "3"),
        ([text("3")], {"result": "3"}, "3"),
        ([text("a"), text("b")], {"result": ["a", "b"]}, "a\nb"),
        ([text("Done.")], HEIGHT, 'Done.\n{"height_cm": 181.5}'),
        ([ImageContent(type="image", data=IN_TEXT, mime_type="image/png")], None, [PNG]),
        ([text("a"), file("image/png", IN_TEXT)], None, ["a", PNG]),
        (
            [file("application/pdf", "AAAA")],
            None,
            "(the file file:///a, application/pdf, 3 bytes, which cannot be shown)",
        ),
        (
            [AudioContent(type="audio", data="AAAA", mime_type="audio/wav")],
            None,
            "(a part of type audio, audio/wav, 3 bytes, which cannot be shown)",
        ),
        (
            [ImageContent(type="image", data="AAAA", mime_type="image/svg+xml")],
            None,
            "(a part of type image, image/svg+xml, 3 bytes, which cannot be shown)",
        ),
        (
            [ResourceLink(type="resource_link", name="a", uri="file:///a", description="A map")],
            None,
            "(a link: a, file:///a, A map)",
        ),
    ],
)
def test_each_part_of_a_result_is_shown_or_named(content: Any, structured: Any, seen: Any) -> None:
    assert mcp.shown("look", CallToolResult(content=content, structured_content=structured)) == seen
    error = CallToolResult(content=content, structured_content=structured, is_error=True)
    is_text = isinstance(seen, str)
    said = seen if is_text else "\n".join(part for part in seen if isinstance(part, str))
    with pytest.raises(ToolError) as caught:
        mcp.shown("look", error)
    assert str(caught.value).startswith(f"look: {said}")
    assert ("(1 images, which" in str(caught.value)) != is_text


def test_arguments_in_tags_have_the_types_of_the_schema(url: str) -> None:
    async def steps(session: Any, shown: Observation) -> Any:
        values = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n5\n</parameter>"
        step = await session.step(
            f"<tool_call>\n<function=add>\n{values}\n</function>\n</tool_call>"
        )
        return parts(step.observation)

    assert play("tools", steps, chat="xml", tools=(url,)) == "6"


def test_what_goes_wrong_in_a_tool_is_an_observation_and_the_session_goes_on(url: str) -> None:
    async def work() -> None:
        async with pool("tools", tools=(url,)) as made:
            session = await opened(made, tool_timeout=scaled(5))
            await session.reset(ROW, 0)
            assert await result(session, "fail", reason="no luck") == FAILURE
            assert "error: add: " in await result(session, "add", a="one", b=2)
            assert "there is no tool jump" in await result(session, "jump")
            assert await result(session, "add", a=1, b=1) == "2"
            assert await result(session, "slow", seconds=600) == (
                f"error: slow: no result in {scaled(5):g} s"
            )
            assert await result(session, "add", a=1, b=1) == "2"

    asyncio.run(work())


def test_each_episode_has_a_session_of_its_own(address: str) -> None:
    async def work() -> None:
        async with pool("tools", tools=(address,)) as made:
            sessions = [await opened(made, tool_timeout=scaled(60)) for _ in range(3)]
            await asyncio.gather(*(session.reset(ROW, 0) for session in sessions))
            assert children(made) == [], "a server starts with the first call"
            first = await asyncio.gather(*(result(session, "place") for session in sessions))
            second = await asyncio.gather(*(result(session, "place") for session in sessions))
            assert [text.split()[1] for text in first] == ["1"] * 3
            assert [text.split()[1] for text in second] == ["2"] * 3
            places = {text.split()[0] for text in first}
            assert len(places) == (1 if address.startswith("http") else 3)
            started = children(made)
            for session in sessions:
                session.close()
            await ended(made)
            await gone(started)
            assert made._processes[0].takes_sessions, "no process was left behind"

    asyncio.run(work())


@pytest.mark.slow
def test_a_server_that_ends_is_an_observation_for_its_episode_alone() -> None:
    async def work() -> None:
        async with pool("tools", tools=(COMMAND,)) as made:
            session, other = [await opened(made) for _ in range(2)]
            for one in (session, other):
                await one.reset(ROW, 0)
                assert await result(one, "add", a=1, b=1) == "2"
            for _ in range(2):
                assert (await result(session, "end")).startswith("error: end: ")
            assert await result(other, "add", a=1, b=1) == "2"

    asyncio.run(work())


async def begun(made: EnvironmentPool, kind: str = "") -> tuple[Any, list[psutil.Process]]:
    """Return an episode and the processes of its server."""
    session = await opened(made)
    await session.reset(ROW, 0)
    found = [int((await result(session, "place")).split()[0])]
    if not kind:
        found.append(int(await result(session, "child")))
    return session, [psutil.Process(process) for process in found]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "stubborn"])
def test_no_server_outlives_its_episode(kind: str, tmp_path: Path) -> None:
    """One after the other: closed, given up during a call, and open when the pool is closed."""

    async def work() -> None:
        async with pool("tools", tools=(f"{COMMAND} {kind}",)) as made:
            session, found = await begun(made, kind)
            session.close()
            await gone(found)
            session, found = await begun(made, kind)
            calling = call("slow", seconds=600, begun=str(tmp_path / "begun"))
            step = asyncio.create_task(session.step(calling))
            while not (tmp_path / "begun").exists():
                assert not step.done()
                await asyncio.sleep(0.02)
            step.cancel()
            session.close()
            await gone(found)
            _, found = await begun(made, kind)
            await made.close()
            await gone(found)

    asyncio.run(work())


def test_no_server_outlives_the_process_of_its_episode() -> None:
    async def work() -> None:
        async with pool("tools", tools=(f"{COMMAND} stubborn",)) as made:
            session, found = await begun(made, "stubborn")
            os.kill(made._processes[0]._process.pid, signal.SIGKILL)
            with pytest.raises(CallFailure):
                await session.step(call("place"))
            await gone(found)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        (
            ["no-such-command --fast"],
            "nor the command of an MCP server: there is no command no-such",
        ),
        ([f"{sys.executable} -c 1/0"], "does not start .*; it printed: ZeroDivisionError"),
        (["http://127.0.0.1:1/mcp"], "the MCP server 'http://127.0.0.1:1/mcp' does not start"),
    ],
)
def test_a_server_that_does_not_start_ends_a_run_before_it_starts(
    tools: list[str], problem: str
) -> None:
    refused("tools", problem, tools=tuple(tools))


def test_two_tools_of_one_name_end_a_run_before_it_starts(url: str) -> None:
    refused("tools", r"environment\.tools has two tools named add", tools=(url, url))
