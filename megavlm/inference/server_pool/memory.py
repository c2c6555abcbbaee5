"""GPU memory that servers release and take back, by SGLang's tags: weights, kv_cache.

A server must be idle when it releases; and what it takes back must be what it released, or its
scheduler dies. So each server's tags are kept here, and while any is released, no server is probed
with a generated token or started anew (`ServerPool.resting`).
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import httpx

from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import State
from megavlm.inference.server_pool.targets import Target

FLUSH = "/flush_cache?timeout=20"  # seconds that it may wait for the scheduler
LOST = "its weights were released without a copy"


class ServerMemory:
    """keeps_weights: weights that come back are those that were released (SGLang's
    enable_weights_cpu_backup); else the server needs all of them again. timeout: of a request,
    seconds. A server that fails a request is told to the fleet.
    """

    def __init__(self, server_pool: ServerPool, *, keeps_weights: bool, timeout: float) -> None:
        self._server_pool, self._keeps_weights = server_pool, keeps_weights
        self._released: defaultdict[str, list[str]] = defaultdict(list)
        self._http = httpx.Client(timeout=timeout, trust_env=False)

    def release(self, tags: Sequence[str]) -> None:
        if not tags:
            return
        self._server_pool.wait_while(State.STARTING)
        self._server_pool.resting = True

        def one(target: Target) -> None:
            fresh = [tag for tag in tags if tag not in self._released[target.url]]
            # Whatever still runs there, cancelled by the client, ends first: SGLang answers an
            # abort before its scheduler, which must be idle, knows of it, and a flush after that.
            self._post(target, "/pause_generation", {"mode": "abort"})
            self._post(target, "/continue_generation", {})
            if not self._released[target.url]:  # else nothing has run
                self._post(target, FLUSH, {})
            for tag in fresh:
                self._post(target, "/release_memory_occupation", {"tags": [tag]})
                self._released[target.url].append(tag)

        self._each(one)

    def resume(self, tags: Sequence[str], *, starts: bool) -> None:
        """`starts`: servers may start anew from now on, with all their memory."""

        def one(target: Target) -> None:
            for tag in tags:
                if tag in self._released[target.url]:
                    self._post(target, "/resume_memory_occupation", {"tags": [tag]})
                    self._released[target.url].remove(tag)
                    if tag == "weights" and not self._keeps_weights:
                        self._server_pool.wrong_version(target.url, LOST)

        self._each(one)
        if starts:
            self._released.clear()  # of servers that died meanwhile
            self._server_pool.resting = False

    def _each(self, one: Any) -> None:
        self._server_pool.wait_while(
            State.SUSPECT
        )  # it may have memory to release, or to take back
        targets = self._server_pool.answering()

        def attempt(target: Target) -> None:
            try:
                one(target)
            except httpx.HTTPError as error:
                self._server_pool.failed(target.url, f"{target.url}: {error!r}")

        with ThreadPoolExecutor(max(len(targets), 1)) as pool:
            list(pool.map(attempt, targets))

    def _post(self, target: Target, path: str, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {target.admin_key}"} if target.admin_key else {}
        self._http.post(target.url + path, json=body, headers=headers).raise_for_status()

    def __enter__(self) -> "ServerMemory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()
