"""Servers that load the weights of the last push between pushes, from a store."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.inference.server_pool.records import ServerRecords
from megavlm.inference.server_pool.state import Event, EventKind, RestartPolicy, State


class CatchUp(ServerRecords):
    """Records whose stale servers get the weights of the last push without another one. A server is
    left out of pushes meanwhile.
    """

    def __init__(
        self, handles: Sequence[ServerHandle], policy: RestartPolicy, log: Callable[[str], None]
    ) -> None:
        super().__init__(handles, policy, log)
        self._catching_up: set[str] = set()  # URLs
        self._catch_up: Callable[[Receiver], str | None] | None = None
        self._pushed: str | None = None  # version of the last push

    def may_probe(self, url: str) -> bool:
        with self._lock:
            return super().may_probe(url) and url not in self._catching_up

    def catch_up_by(self, catch_up: Callable[[Receiver], str | None]) -> None:
        with self._lock:
            self._catch_up = catch_up

    def start_catching_up(self) -> None:
        """Start to bring up to date all servers that have answered and lack the weights. Each is
        left out of pushes meanwhile.
        """
        with self._lock:
            if self._catch_up is None or self._pushed is None:
                return
            for url, handle in self.handles.items():
                if self._records[url].state is State.STALE and self.may_probe(url):
                    self._catching_up.add(url)
                    # A daemon, because the end of the run must not wait for a store.
                    work = partial(self._bring_up_to_date, self._catch_up, self._receiver(handle))
                    threading.Thread(target=work, name=f"catch up {url}", daemon=True).start()

    def _bring_up_to_date(
        self, catch_up: Callable[[Receiver], str | None], receiver: Receiver
    ) -> None:
        url, event = receiver.url, None
        try:
            if version := catch_up(receiver):
                event = Event(EventKind.REFITTED, version=version)
        except WeightSyncError as error:
            self._log(f"rollout server {url} could not be brought up to date: {error}")
            event = Event(EventKind.SYNC_FAILED, reason=str(error))
        with self._lock:
            self._catching_up.discard(url)
            is_late = event is not None and event.version not in ("", self._pushed)
            if event is not None and not is_late:  # after another push it tries once more
                self.apply(url, event)

    def _receiver(self, handle: ServerHandle) -> Receiver:
        return Receiver(
            url=handle.url,
            tensor_parallel=handle.tensor_parallel,
            device=handle.device,
            needs_all=self._records[handle.url].version is None,
            api_key=handle.api_key,
            admin_key=handle.admin_key,
            node=handle.node,
        )
