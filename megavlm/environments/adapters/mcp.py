"""Tools of MCP servers, for environment.tools."""

import asyncio
import base64
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import IO, Any

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import (
    CallToolResult,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from megavlm.environments.base import Image
from megavlm.environments.content import is_picture
from megavlm.environments.tools.schemas import shortened, strict_json
from megavlm.environments.tools.tool import Tool, ToolError

START_SECONDS = 60.0
# A server by command must not outlive its episode's thread, also where that is killed: it runs this
# program before the command. See `die_with` in megavlm/process.py.
_START = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)})
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class MCPServer:
    """An MCP server of a recipe, and the tools that it lists.

    address: URL of a server (streamable HTTP), or the command that starts one (stdio).
    """

    def __init__(self, address: str) -> None:
        """List the tools. Raises ValueError if the server does not answer."""
        self._address = address
        self._is_remote = address.startswith(("http://", "https://"))
        self._command = [] if self._is_remote else shlex.split(address)
        if self._command and shutil.which(self._command[0]) is None:
            raise ValueError(
                f"environment.tools: {address!r} is neither a function as package.module:name, nor "
                f"a URL, nor the command of an MCP server: there is no command {self._command[0]}"
            )
        with tempfile.TemporaryFile("w+") as printed:
            try:
                self.schemas = asyncio.run(self._list(printed))
            except (OSError, MCPError, ExceptionGroup) as error:
                printed.seek(0)
                last = printed.read().strip().rpartition("\n")[2]
                reason = f"{_reason(error)}; it printed: {last}" if last else _reason(error)
                raise ValueError(
                    f"environment.tools: the MCP server {address!r} does not start ({reason})"
                ) from error

    def client(self, printed: Any = None) -> Client:
        """Return a client that is not connected. printed: File for what a command prints."""
        # With a handshake, a server on HTTP has a session for each client, and so for each episode.
        if self._is_remote:
            return Client(self._address, mode="legacy")
        arguments = ["-I", "-S", "-c", _START, str(os.getpid()), *self._command]
        server = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
        return Client(stdio_client(server, printed or sys.stderr), mode="legacy")

    def open(self) -> "MCPSession":
        return MCPSession(self)

    async def _list(self, printed: IO[str]) -> list[dict[str, Any]]:
        tools, cursor = [], None
        async with asyncio.timeout(START_SECONDS), self.client(printed) as client:
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if (cursor := page.next_cursor) is None:
                    break
        return [
            {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": shortened(tool.input_schema),
            }
            for tool in tools
        ]


class MCPSession:
    """A session with an MCP server, for one episode. The first call opens it."""

    def __init__(self, server: MCPServer) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] | None = None
        self._closing = asyncio.Event()
        self.tools = [Tool(s, partial(self._call, s["name"])) for s in server.schemas]

    async def close(self) -> None:
        """Close the session and, if a command started it, the server."""
        self._closing.set()
        if self._task is not None and self._client is not None:
            if not self._client.done():
                self._task.cancel()
            await asyncio.wait([self._task])

    async def _hold(self, opened: "asyncio.Future[Client]") -> None:
        """Hold the client in one task: it must be left where it was entered."""
        async with self._server.client() as client:
            opened.set_result(client)
            await self._closing.wait()

    async def _call(self, name: str, /, **arguments: Any) -> str | list[str | Image]:
        if self._client is None or self._task is None:
            self._client = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(self._client))
        # A call that is given up leaves the session open for the next one.
        await asyncio.wait([self._client, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            raise ToolError(f"{name}: the server has ended ({_reason(self._task.exception())})")
        result = await self._client.result().call_tool(name, arguments)
        return shown(name, result)


def shown(name: str, result: CallToolResult) -> str | list[str | Image]:
    """Return the result of a tool as the policy sees it. Raises ToolError if it is an error."""
    parts = [_part(block) for block in result.content]
    texts = [part for part in parts if isinstance(part, str)]
    if not _repeats(texts, result.structured_content):
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
        parts.append(texts[-1])
    if result.is_error:
        num_images = len(parts) - len(texts)
        texts += [f"({num_images} images, which an error does not show)"] * bool(num_images)
        raise ToolError(f"{name}: " + "\n".join(texts))
    return parts if len(texts) < len(parts) else "\n".join(texts)


def _repeats(texts: Sequence[str], structured: Any) -> bool:
    """Return True if the texts say the structured content, as servers should do for clients that
    do not read it. A value that is no object is its `result`.
    """
    alone = isinstance(structured, dict) and structured.keys() == {"result"}
    value = structured["result"] if alone else structured
    read = list(map(_read, texts))
    return structured is None or (
        bool(texts) and (structured in read or value in (texts, read, *texts, *read))
    )


def _read(text: str) -> Any:
    try:
        return strict_json.decode(text)
    except (ValueError, RecursionError):
        return text


def _part(block: Any) -> str | Image:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ResourceLink):
        about = (block.title or block.name, block.uri, block.mime_type, block.description)
        return f"(a link: {', '.join(filter(None, about))})"
    if isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
        return block.resource.text
    if isinstance(block, EmbeddedResource):
        what, kind = f"the file {block.resource.uri}", block.resource.mime_type
        data = base64.b64decode(block.resource.blob)
    else:
        what, kind, data = (
            f"a part of type {block.type}",
            block.mime_type,
            base64.b64decode(block.data),
        )
    if is_picture(data):
        return Image(data)
    return f"({what}, {kind or 'of unknown type'}, {len(data)} bytes, which cannot be shown)"


def _reason(error: BaseException | None) -> str:
    """Return the message of an error, or of the first in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
