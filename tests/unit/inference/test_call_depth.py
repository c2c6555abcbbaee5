"""Functions of ours between RolloutClient.generate and the HTTP request."""

import asyncio
import inspect
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

import megavlm
from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import Sampling
from tests.fakes.fixed_servers import FixedServers
from tests.fakes.server import FakeServer
from tests.unit.inference.prompts import make_prompt

PACKAGE = Path(megavlm.__file__).parent
BOUND = 3


def our_functions() -> list[str]:
    """Return the functions of megavlm on the stack, the outermost first."""
    frames = [frame.frame for frame in inspect.stack(context=0)]
    return [
        frame.f_code.co_qualname
        for frame in reversed(frames)
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE)
    ]


def test_a_request_is_few_functions_away_from_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: dict[asyncio.Task[Any] | None, list[str]] = {}  # functions on the way to a task
    paths: list[list[str]] = []
    create_task = asyncio.create_task
    handle_request = httpx.AsyncHTTPTransport.handle_async_request

    def recording_task(work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        task = create_task(work, **options)
        makers[task] = our_functions()
        return task

    async def recording_request(
        transport: httpx.AsyncHTTPTransport, request: httpx.Request
    ) -> httpx.Response:
        made_by = makers[asyncio.current_task()]
        paths.append(made_by + [name for name in our_functions() if name not in made_by])
        return await handle_request(transport, request)

    monkeypatch.setattr(asyncio, "create_task", recording_task)
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", recording_request)
    with FakeServer() as fake, RolloutClient(FixedServers(fake.url)) as client:
        client.generate([make_prompt()], n=1, sampling=Sampling(1.0, 4))
    ((first, *others),) = paths
    assert first == "RolloutClient.generate"
    assert 1 <= len(others) <= BOUND, others
