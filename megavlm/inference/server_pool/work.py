"""Signs of work of a server that answers no probe, to tell a busy server from a dead one."""

import time
from dataclasses import dataclass
from typing import Any

from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.probes import ProbeError, Probes

# Share of one core that counts as work. An idle server uses less, a stopped one nothing; a busy one
# uses more, even if twenty processes share a core.
WORK_SHARE = 0.03


@dataclass(frozen=True)
class WorkReading:
    """The work that a server had done at `time`, in seconds of a monotonic clock.

    cpu_seconds: CPU time of all its processes, for a managed server on a CPU only: on a GPU SGLang
    uses a whole core even while it waits. counters: Counters of its schedulers, for other servers.
    None if not known.
    """

    time: float
    cpu_seconds: float | None = None
    counters: list[Any] | None = None

    def shows_work(self, since: "WorkReading") -> bool:
        """Return True if the server has worked since an earlier reading."""
        if self.cpu_seconds is not None and since.cpu_seconds is not None:
            seconds = self.time - since.time
            return self.cpu_seconds - since.cpu_seconds > WORK_SHARE * seconds
        return None not in (self.counters, since.counters) and self.counters != since.counters

    @property
    def has_requests(self) -> bool:
        """False if the counters show that the server has no requests. Probes change the counters,
        too, so a change by itself does not show a request.
        """
        return self.counters is None or any(used for _, used in self.counters)


async def read_work(handle: ServerHandle, probes: Probes) -> WorkReading:
    """Read the work that the server has done so far."""
    now, server = time.monotonic(), handle.server
    if server is not None and server.device == "cpu":
        return WorkReading(now, cpu_seconds=server.cpu_seconds)
    try:
        return WorkReading(now, counters=await probes.counters(handle))
    except ProbeError:
        return WorkReading(now)
