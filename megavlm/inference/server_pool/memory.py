"""GPU memory that servers release and resume, by SGLang's tags.

A server must be idle when it releases memory, and may resume only memory that it released, or its
scheduler dies. So the released tags of each server are recorded here. While any memory is released,
no server is restarted or probed by generating a token (`ServerPool.resting`).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from megavlm.config.rollout import Rollout
from megavlm.inference.protocol import bearer
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.inference.server_pool.state import State
from megavlm.parallel import platform

TAGS = ("weights", "kv_cache", "cuda_graph")  # all that a server releases
FLUSH_CACHE = "/flush_cache?timeout=20"  # wait up to 20 s for the scheduler


def keeps_weights(rollout: Rollout) -> bool:
    """Return True if a server that releases its weights has them again when it resumes their
    memory; otherwise it needs all weights again.
    """
    return bool(rollout.server_args.get("enable_weights_cpu_backup")) or not platform.has_gpu()


class ServerMemory:
    """Context manager for the servers' memory. A server that fails a request is reported to the
    pool as a failed push.
    """

    def __init__(self, server_pool: ServerPool, rollout: Rollout) -> None:
        self._server_pool, self._keeps_weights = server_pool, keeps_weights(rollout)
        self._released: defaultdict[str, list[str]] = defaultdict(list)
        self._http = httpx.Client(timeout=rollout.request_timeout, trust_env=False)

    def release(self, tags: Sequence[str]) -> None:
        """Release the memory of `tags` on all servers. The pool does not probe or restart servers
        until `resume`.
        """
        if not tags:
            return
        self._server_pool.wait_while(State.STARTING)
        self._server_pool.resting = True

        def release_one(receiver: Receiver) -> None:
            released = self._released[receiver.url]
            fresh = [tag for tag in tags if tag not in released]
            # End requests that the client has cancelled: the scheduler must be idle. SGLang answers
            # an abort before its scheduler has handled it, but a flush only afterwards.
            self._post(receiver, "/pause_generation", {"mode": "abort"})
            self._post(receiver, "/continue_generation", {})
            if not released:  # otherwise nothing has run since
                self._post(receiver, FLUSH_CACHE, {})
            if fresh:
                self._post(receiver, "/release_memory_occupation", {"tags": fresh})
                released += fresh

        self._on_each(release_one)

    def resume(self, tags: Sequence[str], *, starts: bool) -> None:
        """Resume the memory of `tags` on all servers. starts: True if the servers now have all
        their memory, so that dead servers may restart.
        """

        def resume_one(receiver: Receiver) -> None:
            released = self._released[receiver.url]
            wanted = [tag for tag in tags if tag in released]
            if wanted:
                self._post(receiver, "/resume_memory_occupation", {"tags": wanted})
                self._released[receiver.url] = [tag for tag in released if tag not in wanted]
            if "weights" in wanted and not self._keeps_weights:
                reason = "its weights were released without a copy"
                self._server_pool.wrong_version(receiver.url, reason)

        self._on_each(resume_one)
        if starts:
            self._released.clear()  # forget servers that have died
            self._server_pool.resting = False

    def _on_each(self, work: Callable[[Receiver], None]) -> None:
        # A suspect server may have memory to release or resume, so wait for its probe.
        self._server_pool.wait_while(State.SUSPECT)
        receivers = self._server_pool.answering()

        def attempt(receiver: Receiver) -> None:
            try:
                work(receiver)
            except httpx.HTTPError as error:
                self._server_pool.failed(receiver.url, f"{receiver.url}: {error!r}")

        with ThreadPoolExecutor(max(len(receivers), 1)) as pool:
            list(pool.map(attempt, receivers))

    def _post(self, receiver: Receiver, path: str, body: dict[str, Any]) -> None:
        reply = self._http.post(receiver.url + path, json=body, headers=bearer(receiver.admin_key))
        reply.raise_for_status()

    def __enter__(self) -> "ServerMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
