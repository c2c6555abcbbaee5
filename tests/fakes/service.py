"""HTTP servers in threads, and one that a reward might be computed by, with scripted faults."""

import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

Fault = Literal["500", "404", "429", "redirect", "garbage", "endless", "hang"]


class _Server(ThreadingHTTPServer):
    allow_reuse_address = daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away in mid-answer


class Served:
    """Context manager: an HTTP server in a thread. `requests` holds (path, body, authorization).
    A handler has it as `fake`.
    """

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.requests: list[tuple[str, Any, str | None]] = []
        self.closed = threading.Event()
        bound = type("Bound", (handler,), {"fake": self, "log_message": lambda *_: None})
        self._http = _Server((host, port), bound)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self.url = f"http://{host}:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.closed.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class FakeService(Served):
    """Answers `answer` as JSON."""

    def __init__(self, answer: Any, *faults: Fault) -> None:
        super().__init__(_Handler)
        self.answer, self.script = answer, deque(faults)
        self.retry_after = "0"


class _Handler(BaseHTTPRequestHandler):
    fake: FakeService

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.requests.append((self.path, body, self.headers["Authorization"]))
        fault = fake.script.popleft() if fake.script else None
        if fault == "hang":
            fake.closed.wait()
            return
        self.send_response(
            {"500": 500, "404": 404, "429": 429, "redirect": 307}.get(fault or "", 200)
        )
        if fault == "redirect":
            self.send_header("Location", fake.url + "/elsewhere")
        if fault == "429":
            self.send_header("Retry-After", fake.retry_after)
        self.end_headers()
        if fault == "endless":
            try:
                while not fake.closed.is_set():
                    self.wfile.write(b" " * 2**16)
            except OSError:
                pass  # the client has had enough
        elif fault == "garbage":
            self.wfile.write(b'{"reward": ')
        elif fault is None:
            self.wfile.write(json.dumps(fake.answer).encode())
