"""Tools that a recipe names in environment.tools."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megavlm.environments.tools.tool import Tool
from megavlm.import_path import IMPORT_PATH, import_of_key

if TYPE_CHECKING:
    from megavlm.environments.adapters.mcp import MCPServer, MCPSession


@dataclass
class OpenTools:
    """The tools of one episode, and its sessions with MCP servers."""

    tools: list[Tool]
    sessions: "list[MCPSession]"

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self.sessions))


@dataclass(frozen=True)
class Toolbox:
    """The tools of a recipe: functions, and MCP servers, which hold a session for each episode."""

    functions: Sequence[Tool]
    servers: "Sequence[MCPServer]"

    def open(self) -> OpenTools:
        """Return the tools for an episode."""
        sessions = [server.open() for server in self.servers]
        tools = [tool for session in sessions for tool in session.tools]
        return OpenTools([*self.functions, *tools], sessions)


def load_tools(named: Sequence[str], own: Sequence[str] = ()) -> Toolbox:
    """Import the functions, and list the tools of MCP servers. own: Names of the tools that the
    environment itself has.

    Raises ValueError for a function that cannot be imported or be a tool, a server that does not
    start, and two tools of one name.
    """
    functions = [_function(name) for name in named if IMPORT_PATH.fullmatch(name)]
    servers = [_server(name) for name in named if not IMPORT_PATH.fullmatch(name)]
    names = [tool.name for tool in functions] + [s["name"] for one in servers for s in one.schemas]
    for name in names:
        if name in own:
            raise ValueError(
                f"environment.tools has a tool named {name}, and so has the environment itself: "
                "rename one"
            )
        if names.count(name) > 1:
            raise ValueError(f"environment.tools has two tools named {name}: rename one")
    return Toolbox(functions, servers)


def _function(path: str) -> Tool:
    function = import_of_key("environment.tools", path)
    if not callable(function):
        raise ValueError(f"environment.tools: {path} is not a function")
    return Tool.of(function)


def _server(address: str) -> "MCPServer":
    try:
        from megavlm.environments.adapters.mcp import MCPServer
    except ImportError as error:
        raise ValueError(
            f"environment.tools: {address!r} is not a function as package.module:name, and an MCP "
            f"server needs a package that is missing ({error}): pip install 'megavlm[mcp]'"
        ) from error
    return MCPServer(address)
