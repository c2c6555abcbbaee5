"""The proxy of a browser: it serves the pages of a folder, and refuses everything else."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

ORIGIN = "http://pages.test"  # RFC 6761: no real host has this name


@contextmanager
def serving(folder: str) -> Iterator[str]:
    """Serve a folder as ORIGIN to whoever takes the server as an HTTP proxy, and yield its address
    as HOST:PORT.
    """
    handler = partial(_Handler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if not self.path.startswith(ORIGIN + "/"):  # a proxy is asked for whole URLs
            self.send_error(403, "This origin is not allowed")
            return
        self.path = self.path.removeprefix(ORIGIN)
        super().do_GET()

    do_HEAD = do_GET

    def do_CONNECT(self) -> None:
        self.send_error(403, "This origin is not allowed")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a worker's output is kept for errors."""
