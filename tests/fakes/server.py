"""An HTTP server that answers as SGLang does, except where a test tells it to fail.

`script` holds the fault of each coming request, in order; when it is empty, requests succeed.
Answers have the form recorded from SGLang 0.5.23. Nothing here sleeps: a request that must hang
waits until the server is closed.
"""

import json
import socket
import struct
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["500", "400", "reset", "garbage", "wrong form", "hang", "slow body"]


class FakeServer:
    """Context manager. `requests` lists (path, body, authorization) of what came in."""

    def __init__(self, *faults: Fault, prompt_tokens: int = 3, weight_version: str = "1") -> None:
        self.script = deque(faults)
        self.requests: list[tuple[str, Any, str | None]] = []
        self.prompt_tokens = prompt_tokens
        self.weight_version = weight_version
        self.refused: dict[str, set[int]] = {}  # path -> which of its calls, from 1, get 400
        self.deaf = False  # says that it took a new weight version, and did not
        self.closed = threading.Event()
        self._http = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Bound", (_Handler,), {"fake": self})
        )
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.closed.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, body: Any) -> Any:
        if path == "/generate":
            return self._generate(body)
        if path == "/update_weight_version" and not self.deaf:
            self.weight_version = body["new_version"]
        if path == "/model_info":
            return {"weight_version": self.weight_version}
        if path == "/server_info":
            return {"tp_size": 1, "device": "cuda"}
        return {"success": True, "message": "Success."}

    def _generate(self, body: Any) -> Any:
        """Tokens that tell which prompt and which sample they answer: [first prompt id, sample]."""
        items = [
            {
                "text": "",
                "output_ids": [ids[0], sample],
                "meta_info": {
                    "id": "x",
                    "finish_reason": {"type": "stop", "matched": 2},
                    "prompt_tokens": self.prompt_tokens,
                    "completion_tokens": 2,
                    "weight_version": self.weight_version,
                    "output_token_logprobs": [[-0.5, ids[0], None], [-1.5, sample, None]],
                },
            }
            for ids in body["input_ids"]
            for sample in range(body["sampling_params"]["n"])
        ]
        return items if len(items) > 1 else items[0]


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self) -> None:
        self._handle(None)

    def do_POST(self) -> None:
        self._handle(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _handle(self, body: Any) -> None:
        fake = self.fake
        fake.requests.append((self.path, body, self.headers["Authorization"]))
        fault = fake.script.popleft() if fake.script else None
        if sum(p == self.path for p, *_ in fake.requests) in fake.refused.get(self.path, ()):
            self._reply(400, b'{"success": false, "message": "refused as told"}')
            return
        content = json.dumps(fake.answer(self.path, body)).encode()
        if fault in ("500", "400"):
            self._reply(int(fault), b'{"error": {"message": "as told"}}')
        elif fault == "reset":
            linger = struct.pack("ii", 1, 0)  # closing then sends RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
        elif fault == "garbage":
            self._reply(200, b'{"text": ')
        elif fault == "wrong form":
            self._reply(200, b'{"meta_info": {}}')
        elif fault == "hang":
            fake.closed.wait()
        elif fault == "slow body":  # each piece arrives in time, the whole never
            self._head(200, len(content))
            for byte in content:
                self.wfile.write(bytes([byte]))
                if fake.closed.wait(0.02):
                    break
        else:
            self._reply(200, content)

    def _reply(self, status: int, content: bytes) -> None:
        self._head(status, len(content))
        self.wfile.write(content)

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):
            pass  # the connection was reset on purpose, or the client went away
