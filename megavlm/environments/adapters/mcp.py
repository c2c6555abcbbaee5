"""Tools of MCP servers, for environment.tools."""

import asyncio
import base64
import os
import shlex
import shutil
import signal
import sys
import tempfile
from functools import partial
from typing import IO, Any

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import EmbeddedResource, ImageContent, TextContent, TextResourceContents

from megavlm.environments.base import Image
from megavlm.environments.tools.tool import Tool, ToolError, untitled

START_SECONDS = 60.0
# A server by command must not outlive its episode's thread, also where that is killed.
_START = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)})
os.execvp(sys.argv[1], sys.argv[1:])
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
        arguments = ["-I", "-S", "-c", _START, *self._command]
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
                "parameters": untitled(tool.input_schema),
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
        parts = [_part(block) for block in result.content]
        text = "\n".join(part for part in parts if isinstance(part, str))
        if result.is_error:
            raise ToolError(f"{name}: {text}")
        return parts if any(isinstance(part, Image) for part in parts) else text


def _part(block: Any) -> str | Image:
    if isinstance(block, ImageContent):
        return Image(base64.b64decode(block.data))
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
        return block.resource.text
    return f"(a part of type {block.type}, which cannot be shown)"


def _reason(error: BaseException | None) -> str:
    """Return the message of an error, or of the first in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
