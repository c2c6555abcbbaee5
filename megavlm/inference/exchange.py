"""One request to one server: limits on its time, and what a failure of it means."""

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

import httpx

from megavlm.inference.errors import RolloutRequestError
from megavlm.inference.protocol import Response, Sampling
from megavlm.inference.requests import Request
from megavlm.inference.server_pool.routing import Address

ATTEMPTS = 4


@dataclass(frozen=True)
class Limits:
    """Seconds. total: of a request, from the first byte sent to the last one read. body: from the
    head of the answer on, which comes when all tokens are sampled.
    """

    total: float
    body: float
    retry_delay: float
    connect: float = 10.0

    def pause(self, attempts: int) -> float:
        """Before the next attempt after so many failed ones: full jitter."""
        longest = self.retry_delay * 2.0 ** (attempts - 1)
        return longest * secrets.SystemRandom().random()


class Failed(Exception):
    """An attempt that may be made again elsewhere."""


class Exchange:
    """The connections of a run; used on one event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # trust_env: no proxy between a trainer and its servers. No limit on connections here: the
        # rollout bounds what is in flight.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(limits.total, connect=limits.connect),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def generate(
        self, address: Address, request: Request, sampling: Sampling
    ) -> list[list[Response]]:
        """The answer to `request`. Raises Failed, and RolloutRequestError for a 4xx status and as
        `parse_generate` does.
        """
        try:
            async with asyncio.timeout(self.limits.total):
                reply = await self._post(
                    address.url + "/generate", _key(address.api_key), request, sampling
                )
            if reply.is_client_error:
                raise RolloutRequestError(
                    f"{address.url}/generate refused the request of {request.source} "
                    f"({reply.status_code}): {reply.text[:500]}"
                )
            reply.raise_for_status()
            return request.parse(reply.json(), sampling)
        except (httpx.HTTPError, TimeoutError) as error:
            raise Failed(repr(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise Failed(f"malformed answer: {error!r}") from error

    async def _post(
        self, url: str, headers: dict[str, str], request: Request, sampling: Sampling
    ) -> httpx.Response:
        message = self._http.build_request(
            "POST", url, json=request.body(sampling), headers=headers
        )
        reply = await self._http.send(message, stream=True)
        try:
            async with asyncio.timeout(self.limits.body):
                await reply.aread()
        finally:
            await reply.aclose()
        return reply

    async def abort_all(self, address: Address) -> None:
        """Ends every request of a server, which then answers with what it has. A server that does
        not hear it is left to the requests' own limits.
        """
        try:
            await self._http.post(
                address.url + "/abort_request",
                json={"abort_all": True},
                headers=_key(address.admin_key),
                timeout=self.limits.connect,
            )
        except httpx.HTTPError:
            pass


def _key(key: str | None) -> dict[str, Any]:
    return {"Authorization": f"Bearer {key}"} if key else {}
