"""`make bench`: prints episodes a second and the memory of an episode, with 1, 8 and 64 episodes at
a time in the browser of one process. An episode is a page, three actions and four screenshots.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil

from megavlm.rewards.base import Example
from tests.support.browsers import act, needs_chromium
from tests.unit.environments.adapters.played import children, ended, opened, pool

COUNTS, ACTIONS = (1, 8, 64), 3
PAGE = "<button style='width:100%;height:100px'>Press</button><input>"
ROW = Example("Press.", "", extra={"page": "page.html"})


@needs_chromium
def bench_browser(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    asyncio.run(measure(tmp_path))


async def measure(folder: Path) -> None:
    name = "megavlm.environments.browser.environment:Browser"
    options = {"pages": str(folder), "size": [320, 240]}
    async with pool(name, options=options, timeout=300, memory_mb=8192) as made:
        kept = await opened(made)  # the browser stays
        await kept.reset(ROW, 0)
        empty = memory(made)
        print(f"\n{empty:.0f} MB with one episode that waits, the worker's process not counted")
        for count in COUNTS:
            begun = time.perf_counter()
            sessions = [await opened(made) for _ in range(count)]
            await asyncio.gather(*map(play, sessions))
            seconds, full = time.perf_counter() - begun, memory(made)
            for session in sessions:
                made.end(session)
            while len(made._processes[0].sessions) > 1:
                await asyncio.sleep(0.01)
            print(
                f"{count} at a time: {count / seconds:.2f} episodes a second, "
                f"{(full - empty) / count:.0f} MB each"
            )
        made.end(kept)
        await ended(made)


async def play(session: Any) -> None:
    await session.reset(ROW, 0)
    for _ in range(ACTIONS):
        await session.step(act(action="click", coordinate=[500, 100]))


def memory(made: Any) -> float:
    """Return the megabytes of a pool's browser, with the share of each page that is shared."""
    total = 0
    for process in children(made):
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            pass  # it has just ended
    return total / 2**20
