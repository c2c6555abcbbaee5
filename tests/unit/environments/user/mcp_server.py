"""An MCP server: `python mcp_server.py` on stdio, `python mcp_server.py PORT` on HTTP."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult
from PIL import Image as Picture

server = MCPServer("tests", log_level="ERROR")
counts: dict[str, int] = {}


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def picture(shade: int) -> list[Image | str]:
    """Draw a picture."""
    file = BytesIO()
    Picture.new("RGB", (40, 30), (shade, 0, 0)).save(file, "PNG")
    return ["before", Image(data=file.getvalue(), format="png"), "after"]


@server.tool()
def measure() -> CallToolResult:
    """Measure."""
    return CallToolResult(content=[], structured_content={"height_cm": 181.5})


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool()
async def slow(seconds: float, begun: str = "") -> str:
    """Wait. Before that, make the file `begun`."""
    if begun:
        Path(begun).touch()
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def place(context: Context) -> str:
    """Return the process, and how often this client has called."""
    session = str(context.headers.get("mcp-session-id") if context.headers else "")
    counts[session] = counts.get(session, 0) + 1
    return f"{os.getpid()} {counts[session]}"


@server.tool()
def child() -> str:
    """Start a process that stays."""
    return str(subprocess.Popen(["/bin/sleep", "1000"], stdin=subprocess.DEVNULL).pid)


if __name__ == "__main__":
    if "stubborn" in sys.argv:  # it ends neither with its input nor at a signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.run("stdio")
        time.sleep(1000)
    elif sys.argv[1:]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
