"""Request of responses from a server: its prompts, its body, and the limits on its time."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx

from megavlm.inference.errors import RolloutRequestError
from megavlm.inference.protocol import (
    MALFORMED,
    Body,
    Response,
    Sampling,
    TextOf,
    bearer,
    continue_body,
    data_url,
    generate_body,
    parse_continue,
    parse_generate,
)
from megavlm.inference.server_pool.routing import Address
from megavlm.parallel.shared_file import shared_file

if TYPE_CHECKING:
    from megavlm.data.image_processing import ProcessedImage
    from megavlm.data.processor import Prompt

ATTEMPTS = 4  # of a request, at any servers
PROMPTS_PER_REQUEST = 16  # one request costs a server as much as a prompt of 25 tokens
CHUNK_BYTES = 2**20  # of a body that are written at once
TOKENS_PER_REQUEST = 256  # a prompt; for longer responses a request's own cost is nothing


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests. Times in seconds.

    total: of a request, from the first byte sent to the last byte read. token: besides, for each
    token that a response may have. body: from the head of the
    response on, which comes when all tokens are sampled. connect: of a connection. retry_delay:
    longest pause before the first retry. concurrency: prompts in flight at each server.
    image_tokens: bound on the tokens of their images.
    """

    total: float = 300.0
    token: float = 0.0
    body: float = 60.0
    connect: float = 10.0
    retry_delay: float = 1.0
    concurrency: int = 64
    image_tokens: int = 65536

    def slots(self, prompt: "Prompt") -> int:
        """Return how many of the `concurrency` slots of a server a prompt takes: one, or more if
        its images have more than a slot's share of `image_tokens`.
        """
        return max(1, -(-prompt.num_vision_tokens * self.concurrency // self.image_tokens))

    def pause(self, attempts: int) -> float:
        """Return the pause after so many failed attempts: exponential, with full jitter."""
        longest = self.retry_delay * 2.0 ** (attempts - 1)
        return longest * secrets.SystemRandom().random()


class RequestFailed(Exception):
    """An attempt that may be made again, at another server."""


class RequestTimedOut(RequestFailed):
    """An attempt whose answer did not come in time."""


class RequestRefused(RolloutRequestError):
    """A request that a server answered with HTTP 400. If it holds sampled tokens, these may be why:
    they spell what the server takes for an image, or are too many.
    """


@dataclass(eq=False)
class Request:
    """Request for n new responses to each of `prompts`, or for the rest of one prompt's `begun`.

    places: index of each prompt in the batch. slots: how many of a server's it takes. not_before:
    time of the event loop. last_url: the server that failed it last.
    """

    places: list[int]
    prompts: Sequence["Prompt"]
    n: int
    begun: Sequence[Response] = ()
    slots: int = 1
    not_before: float = 0.0
    last_url: str | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def source(self) -> str:
        return self.prompts[0].row.source

    @property
    def key(self) -> str:
        """Key of the first prompt's images: a server that has seen them has their features."""
        return "".join(image.key for image in self.prompts[0].images) or self.source

    async def send(
        self, http: httpx.AsyncClient, address: Address, sampling: Sampling, limits: RequestLimits
    ) -> list[list[Response]]:
        """Send the request and return the responses of each prompt. To a server on this machine,
        images are sent as paths of files in memory.

        Raises RequestFailed if another attempt may succeed, RolloutRequestError for a 4xx status
        and as `parse_generate` does.
        """
        url = address.url + "/generate"
        seconds = limits.total + limits.token * sampling.max_new_tokens
        try:
            with ExitStack() as files:
                text_of = partial(_path_of, files) if address.is_local else data_url
                body = self.body(sampling, text_of)
                if address.is_local:  # short enough for one piece
                    body = [b"".join(body)]
                headers = bearer(address.api_key) | {
                    "Content-Type": "application/json",
                    "Content-Length": str(sum(map(len, body))),
                }
                async with (
                    asyncio.timeout(seconds),
                    http.stream(
                        "POST",
                        url,
                        content=_chunks(body),
                        headers=headers,
                        timeout=httpx.Timeout(None, connect=limits.connect),
                    ) as reply,
                ):
                    try:
                        await asyncio.wait_for(reply.aread(), limits.body)
                    except TimeoutError as error:
                        reason = f"its body took more than {limits.body:g} s"
                        raise RequestTimedOut(reason) from error
            if reply.is_client_error:
                refused = RequestRefused if reply.status_code == 400 else RolloutRequestError
                raise refused(
                    f"{url} returned HTTP {reply.status_code} for the request of {self.source}: "
                    f"{reply.text[:500]}"
                )
            reply.raise_for_status()
            return self.parse(reply.json(), sampling)
        except TimeoutError as error:
            raise RequestTimedOut(
                f"no whole answer within {seconds:g} s (rollout.request_timeout="
                f"{limits.total:g}, and {limits.token:g} s for each of "
                f"{sampling.max_new_tokens} tokens)"
            ) from error
        except httpx.HTTPError as error:
            raise RequestFailed(repr(error)) from error
        except MALFORMED as error:
            raise RequestFailed(f"malformed response: {error!r}") from error

    def body(self, sampling: Sampling, text_of: TextOf) -> list[Body]:
        if self.begun:
            return continue_body(self.prompts[0], self._aborted, sampling, text_of)
        return generate_body(self.prompts, self.n, sampling, text_of)

    def parse(self, answer: Any, sampling: Sampling) -> list[list[Response]]:
        """Return the responses of each prompt, with those that were complete before.

        Raises as `parse_generate` does.
        """
        if not self.begun:
            return parse_generate(answer, self.prompts, self.n, sampling)
        rest = iter(parse_continue(answer, self.prompts[0], self._aborted, sampling))
        return [[r if r.is_complete else next(rest) for r in self.begun]]

    @property
    def _aborted(self) -> list[Response]:
        return [response for response in self.begun if not response.is_complete]


def _path_of(files: ExitStack, image: "ProcessedImage") -> Body:
    """Write an image to a file in memory, which `files` closes, and return its path as JSON."""
    return json.dumps(f"file://{files.enter_context(shared_file(*image.ppm()))}").encode()


async def _chunks(body: Sequence[Body]) -> AsyncIterator[Any]:
    """Yield a body in pieces, which are no copies: asyncio moves what is left of a piece after each
    write.
    """
    for part in body:
        view = memoryview(part)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def make_requests(
    prompts: Sequence["Prompt"],
    n: int,
    sampling: Sampling,
    begun: Sequence[Sequence[Response]],
    limits: RequestLimits,
    *,
    num_servers: int,
    single: bool,
    skipped: Collection[int] = (),
) -> list[Request]:
    """Return requests for all prompts whose groups are not complete, the begun ones first.

    Args:
        begun: what each prompt's group has so far.
        skipped: places of prompts without a request.
        single: one request per prompt, so that no response waits for another prompt's.
    """
    continued = [
        Request([place], [prompts[place]], n, responses, limits.slots(prompts[place]))
        for place, responses in enumerate(begun)
        if any(not r.is_complete for r in responses)
    ]
    fresh = [p for p, responses in enumerate(begun) if not responses and p not in skipped]
    needed = sum(limits.slots(prompts[place]) for place in fresh)
    size = min(  # in slots
        PROMPTS_PER_REQUEST,
        max(1, TOKENS_PER_REQUEST // sampling.max_new_tokens),
        limits.concurrency,
        -(-needed // num_servers) or 1,
    )
    requests: list[Request] = []
    for place in fresh:
        slots = limits.slots(prompts[place])
        last = requests[-1] if requests else None
        if single or last is None or last.slots + slots > size:
            requests.append(Request([place], [prompts[place]], n, slots=slots))
        else:
            last.places.append(place)
            last.prompts = [*last.prompts, prompts[place]]
            last.slots += slots
    return [*continued, *requests]
