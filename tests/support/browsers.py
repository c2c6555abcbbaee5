"""Whether this machine has a browser, calls of the tool of screens, and a server for pages."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

from megavlm.environments.browser.chromium import find_chromium

needs_chromium = pytest.mark.skipif(
    find_chromium() is None,
    reason="a browser needs Chromium (apt-get install chromium-headless-shell)",
)


def act(**arguments: Any) -> str:
    """Write a call of the tool `computer`."""
    call = json.dumps({"name": "computer", "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


class Outside(BaseHTTPRequestHandler):
    """A server of another origin. hits: Paths that it was asked for."""

    hits: list[str]
    ends: Event

    def do_GET(self) -> None:
        self.hits.append(self.path)
        if self.path == "/slow":
            self.ends.wait()
        if self.path == "/loop":
            self.send_response(302)
            self.send_header("Location", "/loop")
        else:
            self.send_response(200)
            if self.path == "/file":
                self.send_header("Content-Disposition", "attachment; filename=x.bin")
        self.end_headers()
        with suppress(ConnectionError):  # the browser has given it up
            self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def outside() -> Iterator[tuple[str, list[str]]]:
    """Run a server, and yield its host with its port, and the paths that it was asked for."""
    handler = type("Handler", (Outside,), {"hits": [], "ends": Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", handler.hits
        handler.ends.set()
        server.shutdown()
