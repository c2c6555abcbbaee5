"""The HTTP server of the gateway. It runs in the asyncio loop that plays the episodes.

    POST /s/KEY/v1/chat/completions    a call of the episode with this key
    GET  /s/KEY/v1/models              one name
    POST /s/KEY/reward                 a number, or {"reward": ...}: ends the episode

Without /s/KEY, the key is read from the header `Authorization: Bearer KEY`.
"""

import asyncio
import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from megavlm.environments.agent import reward_step
from megavlm.inference.requests import RequestTimedOut
from megavlm.rollout.gateway.errors import BadRequest, SessionEnded
from megavlm.rollout.gateway.parameters import ParameterReader
from megavlm.rollout.gateway.replies import Completion
from megavlm.rollout.gateway.session import GatewaySession

MAX_BODY = 2**28  # bytes of a request, with its images
CLOSE_SECONDS = 1.0  # that the replies to open requests have at the end of a session
_RETRIES = "x-stainless-retry-count"  # header of OpenAI's clients


class GatewayServer:
    """Serves the sessions of all episodes that are played."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._sessions: dict[str, GatewaySession] = {}
        self._running: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)  # by key
        self._reader = ParameterReader()

    async def start(self) -> None:
        """Start to listen, on a free port. Raises ValueError if the address cannot be bound."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
        for prefix in ("/s/{key}", ""):
            app.router.add_post(prefix + "/v1/chat/completions", self._chat)
            app.router.add_get(prefix + "/v1/models", self._models)
            app.router.add_post(prefix + "/reward", self._reward)
        # A handler is cancelled when its client is gone.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        try:
            await site.start()
        except OSError as error:
            raise ValueError(
                f"environment.options.host={self._host} cannot be bound ({error}): give an address "
                "of this machine that the agents reach"
            ) from error
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()

    @asynccontextmanager
    async def open(self, session: GatewaySession) -> AsyncIterator[str]:
        """Serve a session, and yield its base URL. Requests that are open at the end are answered
        that the session has ended.
        """
        self._sessions[session.key] = session
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            yield f"http://{host}:{self._port}/s/{session.key}/v1"
        finally:
            del self._sessions[session.key]
            session.close()
            if running := self._running.pop(session.key, None):
                await asyncio.wait(running, timeout=CLOSE_SECONDS)

    def _session(self, request: web.Request) -> GatewaySession:
        key = request.match_info.get("key")
        if key is None:
            key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if (session := self._sessions.get(key)) is None:
            raise SessionEnded("there is no episode with this key, or it has ended")
        return session

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, task = self._session(request), asyncio.current_task()
        assert task is not None
        self._running[session.key].add(task)
        task.add_done_callback(self._running[session.key].discard)
        asked = self._reader.read(await _json(request))
        is_retry = request.headers.get(_RETRIES, "0") != "0"
        completion, calls = await session.answer(asked, is_retry=is_retry)
        try:
            if asked.stream:
                with_usage = bool(asked.stream_options.get("include_usage"))
                reply = await _stream(request, completion, with_usage=with_usage)
            else:
                reply = web.json_response(completion.whole())
                await reply.prepare(request)
                await reply.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            session.cancelled(calls)
            raise
        session.sent(calls)
        return reply

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _reward(self, request: web.Request) -> web.Response:
        session, reward = self._session(request), await _json(request)
        try:
            reward_step(reward)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        session.end(reward)
        return web.json_response({})


async def _stream(
    request: web.Request, completion: Completion, *, with_usage: bool
) -> web.StreamResponse:
    """Send a completion as server-sent events. It is sampled as a whole first."""
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for chunk in completion.chunks(with_usage=with_usage):
        await reply.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await reply.write(b"data: [DONE]\n\n")
    await reply.write_eof()
    return reply


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON ({error})") from error


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer errors in OpenAI's form."""
    try:
        reply: web.StreamResponse = await handler(request)
    except BadRequest as error:
        return _error(400, str(error), error.code)
    except SessionEnded as error:
        return _error(410, str(error))
    except RequestTimedOut as error:
        return _error(410, f"the rollout servers did not answer in time ({error})")
    except web.HTTPRequestEntityTooLarge:
        return _error(413, f"the body has more than {MAX_BODY} bytes")
    return reply


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    values = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": values}, status=status)


def new_key() -> str:
    return secrets.token_urlsafe(24)
