"""Questions to a server about itself. Each returns or raises ProbeError."""

from typing import Any

import httpx

from megavlm.inference.replies import json_object
from megavlm.inference.server_pool.handle import ServerHandle

QUICK = 10.0  # seconds for an answer that needs no model
SLOW = 30.0  # SGLang itself gives up on a generated token after 20 s


class ProbeError(Exception):
    """Why a server's answer is no sign of life."""


class Refused(ProbeError):
    """The server lives and is not one for this run: asking again is useless."""


class Probes:
    """An HTTP client for probes alone, so that no queue of requests delays them."""

    def __init__(self) -> None:
        self._http = httpx.AsyncClient(timeout=QUICK, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def is_up(self, handle: ServerHandle, *, wake: bool) -> tuple[int, str]:
        """It is ready for requests, and it is our server that answers: /health is open to all,
        /server_info is not. Returns how many ranks it has, and their device; Refused where it is
        external and not as this run needs it. `wake`: an external one may have been left paused,
        and is told to go on first.
        """
        if wake and handle.server is None:
            await self._go_on(handle)
        await self._get(handle, "/health", SLOW)
        info = await self._info(handle, "/server_info", SLOW)
        if handle.server is not None:
            return handle.tensor_parallel, handle.device
        try:
            return handle.required.read(info)
        except ValueError as error:
            raise Refused(f"{handle.url} {error}") from error

    async def weight_version(self, handle: ServerHandle) -> str:
        """Asks no model: for idle servers, and while weights are on their way."""
        info = await self._info(handle, "/model_info", QUICK)
        if "weight_version" not in info:
            raise ProbeError("/model_info: it does not say its weight_version, as SGLang does")
        return str(info["weight_version"])

    async def generates(self, handle: ServerHandle) -> None:
        """A real token, or any of what it generates anyway."""
        await self._get(handle, "/health_generate", SLOW)

    async def _go_on(self, handle: ServerHandle) -> None:
        """A trainer that dies in mid-push leaves it paused, and /health, which generates a token,
        fails for as long as it is. One that is not paused takes no notice; whether it refuses the
        key is for the push to say.
        """
        headers = {"Authorization": f"Bearer {handle.admin_key}"} if handle.admin_key else {}
        body = {"torch_empty_cache": False}
        try:
            await self._http.post(handle.url + "/continue_generation", json=body, headers=headers)
        except httpx.HTTPError:
            pass  # the questions that follow tell why

    async def _info(self, handle: ServerHandle, path: str, timeout: float) -> dict[str, Any]:
        try:
            return json_object(await self._get(handle, path, timeout))
        except ValueError as error:
            raise ProbeError(f"{path}: {error}") from error

    async def _get(self, handle: ServerHandle, path: str, timeout: float) -> httpx.Response:
        headers = {"Authorization": f"Bearer {handle.api_key}"} if handle.api_key else {}
        try:
            reply = await self._http.get(handle.url + path, headers=headers, timeout=timeout)
            if reply.status_code in (401, 403):
                raise Refused(
                    f"{handle.url}{path} refused our key ({reply.status_code}): set "
                    "MEGAVLM_ROLLOUT_API_KEY and MEGAVLM_ROLLOUT_ADMIN_KEY to those that the "
                    "server was started with"
                )
            reply.raise_for_status()
            return reply
        except httpx.HTTPStatusError as error:
            raise ProbeError(f"{path} ({error.response.status_code})") from error
        except httpx.HTTPError as error:
            raise ProbeError(f"{path}: {error!r}") from error
