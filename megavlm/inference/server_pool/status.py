"""Files with the states of a pool's servers, for `megavlm watch` and for Prometheus."""

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.probes import ProbeError, Probes
from megavlm.inference.server_pool.records import ServerRecords
from megavlm.inference.server_pool.state import State
from megavlm.observability.prometheus import SERVERS_TEXT, servers_text
from megavlm.writing import write_whole

WRITE_EVERY = 5.0  # seconds


async def write_states(records: ServerRecords, probes: Probes, path: Path) -> None:
    """Write the servers' states to `path`, and as text beside it, every few seconds, until it is
    cancelled. Then remove the files.
    """
    text, run = path.with_name(SERVERS_TEXT), path.resolve().parent.name
    try:
        while True:
            handles = [
                handle
                for url, handle in records.handles.items()
                if records.record(url).state is not State.REMOVED
            ]
            rows = await asyncio.gather(*(_row(records, probes, handle) for handle in handles))
            status = json.dumps({"time": round(time.time(), 3), "servers": rows}).encode()
            with suppress(OSError):  # full disk: status is best-effort, essential writers raise
                await asyncio.to_thread(write_whole, path, status)
                await asyncio.to_thread(write_whole, text, servers_text(run, rows))
            await asyncio.sleep(WRITE_EVERY)
    finally:
        for file in (path, text):
            file.unlink(missing_ok=True)


async def _row(records: ServerRecords, probes: Probes, handle: ServerHandle) -> dict[str, Any]:
    record, queue = records.record(handle.url), None
    if record.state is State.HEALTHY and records.is_generating and not record.busy:
        with suppress(ProbeError):
            queue = await probes.queue(handle)
    return {
        "url": handle.url,
        "state": "busy" if record.busy else record.state.value,
        "seconds": round(records.seconds_in_state(handle.url), 1),
        "version": record.version,
        "queue": queue,
        "restarts": record.restarts,
        "reason": record.reason.split("; the end of")[0],
    }
