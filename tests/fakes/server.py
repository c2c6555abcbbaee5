"""An HTTP server that answers as SGLang does, except where a test scripts a failure.

`script` holds the fault of each coming request, in order (`/generate` alone where `only_generate`);
when it is empty, requests succeed. Answers have the form recorded from SGLang 0.5.23. Nothing here
sleeps: a request that must hang waits until the server is closed.
"""

import json
import socket
import struct
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

from tests.fakes.service import Served

Fault = Literal[
    "500",
    "400",
    "reset",
    "garbage",
    "list",
    "wrong form",
    "cut",
    "NaN",
    "1e999",
    "long number",
    "few",
    "hang",
    "slow body",
    "head only",
]
HEALTH = ("/health", "/health_generate")  # open to all
PROMPT_IDS = 3  # of the prompts that tests make; more ids are tokens to continue from


# Of the answer's first log-prob, its tokens' ids, and the number of its tokens.
_IN_PLACE = {
    "NaN": (b"[[-0.5,", b"[[NaN,"),
    "1e999": (b", null]", b"e999, null]"),
    "long number": (b"[[-0.5,", b"[[-1" + b"0" * 400 + b","),
    "few": (b'"completion_tokens": 2', b'"completion_tokens": 3'),
}


class Refusal(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class FakeServer(Served):
    """A paused one is unhealthy, since SGLang generates a token for /health."""

    def __init__(
        self,
        *faults: Fault,
        prompt_tokens: int = PROMPT_IDS,
        weight_version: str = "1",
        host: str = "127.0.0.1",
        port: int = 0,
        keys: tuple[str, str] | None = None,
        only_generate: bool = False,
        device: str = "cuda",
    ) -> None:
        super().__init__(_Handler, host, port)
        self.script = deque(faults)
        self.only_generate = only_generate
        self.prompt_tokens = prompt_tokens
        self.weight_version = weight_version
        self.device = device
        self.keys = keys  # what reads, what changes; None: everyone may
        self.refused: dict[str, set[int]] = {}  # path -> which of its calls, from 1, get 400
        self.faults: dict[tuple[str, int], Fault] = {}  # of such calls
        self.info: dict[str, Any] = {}  # further fields of /server_info
        self.adapters: list[str] = []
        self.deaf = False  # acknowledges a new weight version and keeps the old one
        self.held: set[int] = set()  # first ids of prompts whose answers wait for an abort
        self.held_once = False  # what is asked for again is not
        self.num_held_tokens = 2  # that they have got by then
        self.aborted = threading.Event()
        self.num_connections = 0
        self.ill = threading.Event()  # /health_generate fails
        self.works = False  # its counters change whenever they are read
        self.num_used_tokens = 0
        self.num_running = 0
        self.gate = threading.Event()  # unset, requests for responses wait
        self.gate.set()
        self.is_paused = False
        self.logprob = -0.5  # what its weights give the first token of a response

    def paths(self) -> list[str]:
        return [path for path, *_ in self.requests]

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body, _ in self.requests if asked == path]

    def answer(self, path: str, body: Any) -> Any:
        if path == "/generate":
            self.num_running += 1
            try:
                while not self.gate.wait(0.02) and not self.closed.is_set():
                    pass
                return self._generate(body)
            finally:
                self.num_running -= 1
        if path in HEALTH and self.is_paused:
            raise Refusal(503, "")
        if path in ("/pause_generation", "/continue_generation"):
            self.is_paused = path == "/pause_generation"
        if path == "/update_weight_version" and not self.deaf:
            self.weight_version = body["new_version"]
        if path == "/abort_request":
            self.aborted.set()
        if path == "/v1/loads?include=core":
            self.num_used_tokens += self.works
            load = {"num_used_tokens": self.num_used_tokens, "total_prefill_uncached_tokens": 5}
            return {"loads": [load | {"num_running_reqs": self.num_running}]}
        if path == "/model_info":
            return {"weight_version": self.weight_version}
        if path == "/server_info":
            return {"tp_size": 1, "device": self.device, "version": "0.5.23"} | self.info
        if path == "/v1/models":
            return {"data": [{"id": name} for name in ["model", *self.adapters]]}
        if path == "/unload_lora_adapter":
            self.adapters.remove(body["lora_name"])
        return {"success": True, "message": "Success."}

    def _generate(self, body: Any) -> Any:
        """Return tokens that identify the prompt and the sample: [first prompt id, sample], or for
        a continuation its number of earlier tokens: [first prompt id, number].
        """
        inputs, parameters = body["input_ids"], body["sampling_params"]
        version = self.weight_version  # by which held ones are sampled, too
        held = self.held & {ids[0] for ids in inputs}  # another's end may change self.held
        if held:
            while not self.aborted.wait(0.02) and not self.closed.is_set():
                pass
        each = parameters if isinstance(parameters, list) else [parameters] * len(inputs)
        items = [
            self._item(ids, sample, version, aborted=ids[0] in held)
            for ids, own in zip(inputs, each, strict=True)
            for sample in range(own["n"])
        ]
        if self.held_once:
            self.held -= {ids[0] for ids in inputs}
        return items if len(items) > 1 else items[0]

    def _item(self, ids: list[int], sample: int, version: str, *, aborted: bool) -> Any:
        begun = len(ids) - PROMPT_IDS
        tokens = [ids[0], begun or sample]
        finish: Any = {"type": "stop", "matched": 2}
        if aborted:
            tokens = [*range(50, 50 + self.num_held_tokens)]
            finish = {"type": "abort", "message": "Aborted"}
        logprobs = [self.logprob - index for index in range(len(tokens))]
        return {
            "text": "",
            "output_ids": tokens,
            "meta_info": {
                "id": "x",
                "finish_reason": finish,
                "prompt_tokens": self.prompt_tokens + begun,
                "completion_tokens": len(tokens),
                "weight_version": version,
                "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
                "output_token_logprobs": [
                    [logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)
                ],
            },
        }


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"  # connections are kept, as SGLang keeps them

    def setup(self) -> None:
        super().setup()
        self.fake.num_connections += 1

    def do_GET(self) -> None:
        self._handle(None)

    def do_POST(self) -> None:
        self._handle(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _handle(self, body: Any) -> None:
        fake = self.fake
        fake.requests.append((self.path, body, self.headers["Authorization"]))
        if not self._is_allowed():
            self._reply(401, b'{"error": "Unauthorized"}')
            return
        if self.path == "/health_generate" and fake.ill.is_set():
            self._reply(503, b"")
            return
        scripted = self.path == "/generate" or not fake.only_generate
        fault = fake.script.popleft() if fake.script and scripted else None
        call = sum(p == self.path for p, *_ in fake.requests)
        if call in fake.refused.get(self.path, ()):
            self._reply(400, b'{"success": false, "message": "refused as scripted"}')
            return
        fault = fake.faults.get((self.path, call), fault)
        if fault == "hang":
            fake.closed.wait()
            return
        status = 200
        try:
            answer = fake.answer(self.path, body)
        except Refusal as refusal:
            status, answer = refusal.status, {"success": False, "message": refusal.message}
        content = json.dumps(answer).encode()
        if fake.closed.is_set():  # it died before it could answer
            self.close_connection = True
            return
        if fault in ("500", "400"):
            self._reply(int(fault), b'{"error": {"message": "as scripted"}}')
        elif fault == "reset":
            linger = struct.pack("ii", 1, 0)  # closing then sends RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
            self.close_connection = True
        elif fault == "garbage":
            self._reply(200, b'{"text": ')
        elif fault == "list":
            self._reply(200, b"[1, 2]")
        elif fault == "wrong form":
            self._reply(200, b'{"meta_info": {}}')
        elif fault == "cut":
            self._reply(200, content[: len(content) // 2])
        elif fault in _IN_PLACE:
            self._reply(200, content.replace(*_IN_PLACE[fault]))
        elif fault == "head only":
            self._head(200, len(content))
            fake.closed.wait()
        elif fault == "slow body":  # each piece arrives in time, the whole never
            self._head(200, len(content))
            for byte in content:
                self.wfile.write(bytes([byte]))
                if fake.closed.wait(0.02):
                    break
        else:
            self._reply(status, content)

    def _is_allowed(self) -> bool:
        if self.fake.keys is None or self.path in HEALTH:
            return True
        reads, changes = self.fake.keys
        known = (
            (reads,) if self.path in ("/generate", "/model_info", "/server_info") else (changes,)
        )
        return self.headers["Authorization"] in [f"Bearer {key}" for key in known]

    def _reply(self, status: int, content: bytes) -> None:
        self._head(status, len(content))
        self.wfile.write(content)

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):
            pass  # the connection was reset on purpose, or the client went away
