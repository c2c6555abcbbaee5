"""Prompts in, responses out: many requests at once to one or several SGLang servers."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx

from megavlm.rollout.errors import RolloutRequestError, RolloutServerError
from megavlm.rollout.messages import Response, Sampling, generate_body, parse_generate

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

CONNECT_TIMEOUT = 10.0  # seconds
PROMPTS_PER_REQUEST = 16  # one request costs the server as much as a prompt of 25 tokens
ATTEMPTS = 4


class RolloutClient:
    """Asynchronous inside, synchronous outside; holds no connection between calls.

    urls: servers with the same model and weights; requests go round them in turn.
    timeout: seconds that one request of up to PROMPTS_PER_REQUEST prompts may take in all.
    concurrency: prompts in flight at once. retry_delay: longest first pause before a retry,
    seconds; it doubles, and each pause is a random part of it.

    A connection error, a time-out, a 5xx status or a malformed answer is retried on the next
    server, ATTEMPTS times in all; generation changes nothing on a server, so no response is lost or
    doubled. A 4xx status is our own mistake and is not retried.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None,
        timeout: float = 300.0,
        concurrency: int = 64,
        retry_delay: float = 1.0,
    ) -> None:
        if not urls:
            raise ValueError("rollout.urls is empty; give the address of at least one server.")
        self.urls = [url.rstrip("/") for url in urls]
        self.timeout = timeout
        self.concurrency = concurrency
        self.retry_delay = retry_delay
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def generate(
        self,
        prompts: Sequence["Prompt"],
        *,
        n: int,
        sampling: Sampling,
        weight_version: int | str | None = None,
    ) -> list[list[Response]]:
        """n responses to each prompt, in the order of the prompts.

        Raises RolloutRequestError when a server refuses a request, RolloutServerError when no
        attempt came through or a response is not of `weight_version` (None: of any), RuntimeError
        when a server counts other prompt tokens than we do.
        """
        groups = asyncio.run(self._generate(prompts, n, sampling))
        versions = {response.weight_version for group in groups for response in group}
        if weight_version is not None and versions - {str(weight_version)}:
            raise RolloutServerError(
                f"responses come from weight versions {sorted(versions)} instead of "
                f"{weight_version}; a server was restarted or changed behind the trainer's back"
            )
        return groups

    async def _generate(
        self, prompts: Sequence["Prompt"], n: int, sampling: Sampling
    ) -> list[list[Response]]:
        size = min(PROMPTS_PER_REQUEST, self.concurrency, -(-len(prompts) // len(self.urls)) or 1)
        slots = asyncio.Semaphore(self.concurrency // size)
        limits = httpx.Limits(max_connections=None)
        # trust_env: no proxy between a trainer and its servers.
        async with httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(self.timeout, connect=CONNECT_TIMEOUT),
            limits=limits,
            trust_env=False,
        ) as http:

            async def one(index: int, part: Sequence["Prompt"]) -> list[list[Response]]:
                async with slots:
                    return await self._request(http, index, part, n, sampling)

            parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
            groups = await asyncio.gather(*(one(*numbered) for numbered in enumerate(parts)))
        return [responses for group in groups for responses in group]

    async def _request(
        self,
        http: httpx.AsyncClient,
        index: int,
        prompts: Sequence["Prompt"],
        n: int,
        sampling: Sampling,
    ) -> list[list[Response]]:
        body = generate_body(prompts, n, sampling)
        for attempt in range(ATTEMPTS):
            url = self.urls[(index + attempt) % len(self.urls)]
            if attempt:
                longest = self.retry_delay * 2 ** (attempt - 1)
                await asyncio.sleep(longest * secrets.SystemRandom().random())
            try:
                async with asyncio.timeout(self.timeout):  # httpx's own is per piece of the body
                    reply = await http.post(url + "/generate", json=body)
                if reply.is_client_error:
                    raise RolloutRequestError(
                        f"{url}/generate refused the request of {prompts[0].row.source} "
                        f"({reply.status_code}): {reply.text[:500]}"
                    )
                reply.raise_for_status()
                return parse_generate(reply.json(), prompts, n)
            except (httpx.HTTPError, TimeoutError) as error:
                problem: Any = error
            except (KeyError, TypeError, ValueError) as error:
                problem = f"malformed answer: {error!r}"
        raise RolloutServerError(
            f"{url}/generate did not answer the request of {prompts[0].row.source} in {ATTEMPTS} "
            f"attempts; the last problem: {problem!r}"
        )
