"""Health probes of a server. A failed probe raises ProbeError."""

from typing import Any

import httpx

from megavlm.inference.protocol import bearer, json_object
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.requirements import check_version

QUICK = 10.0  # seconds for an answer that needs no model
WORK_COUNTERS = ("total_prefill_uncached_tokens", "num_used_tokens")  # reported by each scheduler
QUEUE_COUNTERS = ("num_running_reqs", "num_waiting_reqs")
SLOW = 30.0  # SGLang itself gives up on a generated token after 20 s


class ProbeError(Exception):
    """A failed probe. The message is the reason."""


class Unreachable(ProbeError):
    """Nothing listens at the server's address."""


class Refused(ProbeError):
    """The server runs but does not fit this run, so another probe would not help."""


class Probes:
    """Probes with their own HTTP client, so that no queue of requests delays them."""

    def __init__(self) -> None:
        self._http = httpx.AsyncClient(timeout=QUICK, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def check_started(self, handle: ServerHandle, *, resume: bool) -> None:
        """Check that the server is ready, and set what its handle says of it.

        /server_info needs a key, which /health does not. resume: True to resume an external server
        first that was left paused. Raises Refused if the version of SGLang is too old, or if an
        external server does not meet its requirements.
        """
        if handle.server is not None and not handle.server.listens:
            raise Unreachable(f"no process of the server listens at {handle.url}")
        if resume and handle.server is None:
            await self._resume(handle)
        await self._get(handle, "/health", SLOW)
        info = await self._info(handle, "/server_info", SLOW)
        try:
            check_version(info)
            if handle.server is None:
                found = handle.required.read(info)
                handle.tensor_parallel, handle.device, handle.takes_videos = found
            handle.cache_tokens = info.get("max_total_num_tokens")
        except ValueError as error:
            raise Refused(f"{handle.url} {error}") from error

    async def weight_version(self, handle: ServerHandle) -> str:
        """Return the server's weight version. This probe runs no model, so it suits idle
        servers.
        """
        info = await self._info(handle, "/model_info", QUICK)
        if "weight_version" not in info:
            raise ProbeError("/model_info lacks the weight_version that SGLang reports")
        return str(info["weight_version"])

    async def check_generation(self, handle: ServerHandle) -> None:
        """Check that the server generates tokens, for this probe or for other requests."""
        await self._get(handle, "/health_generate", SLOW)

    async def counters(self, handle: ServerHandle) -> list[Any]:
        """Return counters that change while the server prefills and samples. The schedulers update
        them between forward passes; the server's first process answers.
        """
        loads = await self._loads(handle)
        return [[load.get(name) for name in WORK_COUNTERS] for load in loads]

    async def _loads(self, handle: ServerHandle) -> list[Any]:
        loads = (await self._info(handle, "/v1/loads?include=core", QUICK)).get("loads")
        if not isinstance(loads, list):
            raise ProbeError("/v1/loads lacks the loads that SGLang reports")
        return loads

    async def queue(self, handle: ServerHandle) -> list[int]:
        """Return how many requests are running on the server, and how many are waiting."""
        loads = await self._loads(handle)
        return [sum(load.get(name) or 0 for load in loads) for name in QUEUE_COUNTERS]

    async def abort(self, handle: ServerHandle) -> None:
        """Abort all requests of the server. They return the tokens sampled so far."""
        await self._post(handle, "/abort_request", {"abort_all": True})

    async def _resume(self, handle: ServerHandle) -> None:
        """Resume generation. A trainer that dies during a push leaves the server paused, and
        /health fails then, because it generates a token. A wrong admin key is ignored here; a push
        reports it.
        """
        await self._post(handle, "/continue_generation", {"torch_empty_cache": False})

    async def _post(self, handle: ServerHandle, path: str, body: dict[str, Any]) -> None:
        try:
            await self._http.post(handle.url + path, json=body, headers=bearer(handle.admin_key))
        except httpx.HTTPError:
            pass  # the next probes report the reason

    async def _info(self, handle: ServerHandle, path: str, timeout: float) -> dict[str, Any]:
        try:
            return json_object(await self._get(handle, path, timeout))
        except ValueError as error:
            raise ProbeError(f"{path}: {error}") from error

    async def _get(self, handle: ServerHandle, path: str, timeout: float) -> httpx.Response:
        try:
            reply = await self._http.get(
                handle.url + path, headers=bearer(handle.api_key), timeout=timeout
            )
            if reply.status_code in (401, 403):
                if handle.server is not None:  # the port is taken: ours knows the key
                    raise ProbeError(f"{path}: another program answers at {handle.url}")
                raise Refused(
                    f"{handle.url}{path} refused our key (HTTP {reply.status_code}): set "
                    "MEGAVLM_ROLLOUT_API_KEY and MEGAVLM_ROLLOUT_ADMIN_KEY to those that the "
                    "server was started with"
                )
            reply.raise_for_status()
            return reply
        except httpx.HTTPStatusError as error:
            raise ProbeError(f"{path} returned HTTP {error.response.status_code}") from error
        except httpx.ConnectError as error:
            raise Unreachable(f"{path}: {error!r}") from error
        except httpx.HTTPError as error:
            raise ProbeError(f"{path}: {error!r}") from error
