"""`make bench`: processor time of a request to a rollout server, by the number of requests at a
time, for httpx (before) and for `open_session`. The server is in the same process.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
from aiohttp import web

from megavlm.http_client import open_session

URL, BODY, SECONDS, ROUNDS = "http://127.0.0.1:{port}/generate", bytes(2000), 0.5, 3


def bench_requests() -> None:
    print("\nms of a core for a request, by requests at a time")
    for concurrency in (64, 256):
        before, now = (asyncio.run(_time(kind, concurrency)) for kind in (_httpx, _aiohttp))
        print(f"{concurrency:>5}  httpx {before:.2f}  now {now:.2f}  ratio {before / now:.0f}")


async def _time(kind: Callable[[str, int], Awaitable[None]], concurrency: int) -> float:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(SECONDS)
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    start = time.process_time()
    await kind(URL.format(port=runner.addresses[0][1]), concurrency)
    seconds = time.process_time() - start
    await runner.cleanup()
    return seconds / (concurrency * ROUNDS) * 1e3


async def _httpx(url: str, concurrency: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=60, trust_env=False) as http:
        await _all(lambda: http.post(url, content=BODY), concurrency)


async def _aiohttp(url: str, concurrency: int) -> None:
    async with open_session(connect=10) as http:

        async def post() -> None:
            async with http.post(url, data=BODY) as reply:
                await reply.read()

        await _all(post, concurrency)


async def _all(post: Callable[[], Awaitable[object]], concurrency: int) -> None:
    slots = asyncio.Semaphore(concurrency)

    async def one() -> None:
        async with slots:
            await post()

    await asyncio.gather(*(one() for _ in range(concurrency * ROUNDS)))
