"""A request for responses from a server: its prompts, body and time limits."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from megavlm.inference.answers import MALFORMED, parse_continue, parse_generate, parse_scores
from megavlm.inference.bodies import (
    IN_BODY,
    MEDIA,
    Body,
    Encoder,
    continue_body,
    generate_body,
    score_body,
)
from megavlm.inference.errors import RolloutRequestError
from megavlm.inference.kept_images import LACKS, SentImages
from megavlm.inference.protocol import Response, SamplingParams, Scored, bearer
from megavlm.inference.server_pool.routing import Address
from megavlm.parallel.shared_file import shared_file

if TYPE_CHECKING:
    from megavlm.data.media.image_processing import ProcessedImage
    from megavlm.data.processor import Prompt

ATTEMPTS = 4  # maximum attempts of a request, over all servers
PROMPTS_PER_REQUEST = 16  # one request costs a server as much as a prompt of 25 tokens
CHUNK_BYTES = 2**20  # bytes of a body that are written at once
TOKENS_PER_REQUEST = 256  # prompts x max_new_tokens; with more, overhead is negligible


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests. Times are in seconds.

    total: Time of a request, from the first byte sent to the last byte read. token: Additional time
    for each token that a response may have. body: Time from the response's headers to its end; the
    headers come when all tokens are sampled. connect: Time to open a connection. retry_delay:
    Longest pause before the first retry. concurrency: Prompts in flight at each server.
    image_tokens: Limit on image tokens of the prompts in flight at each server.
    session_tokens: Tokens that later turns may add to a prompt; None if there are none.
    """

    total: float = 300.0
    token: float = 0.0
    body: float = 60.0
    connect: float = 10.0
    retry_delay: float = 1.0
    concurrency: int = 64
    image_tokens: int = 65536
    session_tokens: int | None = None

    def slots(self, prompt: "Prompt") -> int:
        """Return how many of a server's `concurrency` slots a prompt takes: one, or more if its
        images have more tokens than one slot's share of `image_tokens`.
        """
        return max(1, -(-prompt.num_vision_tokens * self.concurrency // self.image_tokens))

    def pause(self, attempts: int) -> float:
        """Return the pause after `attempts` failed attempts: exponential back-off with full
        jitter.
        """
        longest = self.retry_delay * 2.0 ** (attempts - 1)
        return longest * secrets.SystemRandom().random()


class RequestFailed(Exception):
    """A failed attempt that can be retried at another server."""


class RequestTimedOut(RequestFailed):
    """An attempt that timed out."""


class RequestRefused(RolloutRequestError):
    """A request that a server answered with HTTP 400. Sampled tokens in it may be the cause: they
    can spell an image placeholder, or be too many.
    """


@dataclass(eq=False)
class Request:
    """A request for n new responses to each of `prompts`, for the rest of one prompt's aborted
    responses `begun`, or for log-probs of the responses in `scored` to one prompt.

    indices: Index of each prompt in the batch. slots: Slots of a server that it takes. most: Limit
    of a response's tokens, if it is below the sampling's. first_routed: The first token of a prompt
    whose routes are not known from earlier turns. session: For a later turn, the index of its
    session's first prompt and the session's number. not_before: Event loop time before which it is
    not sent. last_url: The server at which it failed last.
    """

    indices: list[int]
    prompts: Sequence["Prompt"]
    n: int
    begun: Sequence[Response] = ()
    slots: int = 1
    scored: Scored | None = field(default=None, kw_only=True)
    most: int | None = None
    first_routed: int = 0
    session: tuple[int, int] | None = None
    not_before: float = 0.0
    last_url: str | None = None

    @property
    def source(self) -> str:
        return self.prompts[0].row.source

    @property
    def key(self) -> str:
        """Key of the first prompt's images. Requests with the same key go to the same server,
        because it has cached the features.
        """
        return "".join(image.key for image in self.prompts[0].images) or self.source

    async def send(
        self,
        http: aiohttp.ClientSession,
        address: Address,
        sampling_params: SamplingParams,
        limits: RequestLimits,
        sent: SentImages,
    ) -> list[list[Response]]:
        """Send the request and return the responses of each prompt. A server on this machine gets
        images and videos as paths of in-memory files. Images that the server has from an earlier
        request are only named; if it has restarted since, they are sent after its refusal.

        Raises RequestFailed if another attempt may succeed, and RolloutRequestError for a 4xx
        status, for videos that the server does not take, or as `parse_generate` does.
        """
        url = address.url + "/generate"
        if not address.takes_videos and any(prompt.sends_frames for prompt in self.prompts):
            media = {image.medium for prompt in self.prompts for image in prompt.images}
            kind = next((x for x in ("video", "audio") if x in media), "processed image") + "s"
            raise RolloutRequestError(
                f"{address.url} does not take the {kind} of {self.source}: only servers that a run "
                "starts itself (rollout.mode=managed), or that python -m megavlm.slurm.servers "
                f"starts, take {kind}, and not through rollout.router"
            )
        if self.most is not None:
            sampling_params = replace(
                sampling_params, max_new_tokens=min(self.most, sampling_params.max_new_tokens)
            )
        seconds = limits.total + limits.token * sampling_params.max_new_tokens
        try:
            status, content = await self._post(
                http, address, sampling_params, limits, sent, seconds
            )
            if status == 400 and LACKS.encode() in content:
                sent.lost(address.url, self._images)
                status, content = await self._post(
                    http, address, sampling_params, limits, sent, seconds
                )
            if status != 200:
                text = content[:500].decode(errors="replace")
                if not 400 <= status < 500:
                    raise RequestFailed(f"HTTP {status}: {text}")
                refused = RequestRefused if status == 400 else RolloutRequestError
                raise refused(
                    f"{url} returned HTTP {status} for the request of {self.source}: {text}"
                )
            answer = orjson.loads(content)
            responses = self.parse(answer, sampling_params)
            sent.answered(address.url, self._images)
            return responses
        except aiohttp.ClientError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise RequestTimedOut(
                f"no whole answer within {seconds:g} s (rollout.request_timeout="
                f"{limits.total:g}, and {limits.token:g} s for each of "
                f"{sampling_params.max_new_tokens} tokens)"
            ) from error
        except MALFORMED as error:
            raise RequestFailed(f"malformed response: {error!r}") from error

    @property
    def _images(self) -> list["ProcessedImage"]:
        """The images that are sent as pictures."""
        return [x for prompt in self.prompts if not prompt.sends_frames for x in prompt.images]

    async def _post(
        self,
        http: aiohttp.ClientSession,
        address: Address,
        sampling_params: SamplingParams,
        limits: RequestLimits,
        sent: SentImages,
        seconds: float,
    ) -> tuple[int, bytes]:
        """Return the status and the content of the answer."""
        with ExitStack() as files:
            own = _in_files(files) if address.is_local else IN_BODY
            encoder = sent.encoder(address.url, own, keeps=address.takes_videos)
            body = self.body(sampling_params, encoder)
            if address.is_local:  # short enough to send at once
                body = [b"".join(body)]
            headers = bearer(address.api_key) | {
                "Content-Type": "application/json",
                "Content-Length": str(sum(map(len, body))),
            }
            async with (
                asyncio.timeout(seconds),
                http.post(
                    address.url + "/generate",
                    data=_chunks(body),
                    headers=headers,
                    allow_redirects=False,
                ) as reply,
            ):
                try:
                    return reply.status, await asyncio.wait_for(reply.read(), limits.body)
                except TimeoutError as error:
                    reason = f"its body took more than {limits.body:g} s"
                    raise RequestTimedOut(reason) from error

    def body(self, sampling_params: SamplingParams, encoder: Encoder) -> list[Body]:
        if self.scored:
            (prompt,) = self.prompts
            responses, top_k = self.scored
            num = len(prompt.token_ids)
            return score_body(prompt, responses, num, sampling_params, encoder, top_k=top_k)
        if self.begun:
            return continue_body(self.prompts[0], self._aborted, sampling_params, encoder)
        return generate_body(self.prompts, self.n, sampling_params, encoder, self.first_routed)

    def parse(self, answer: Any, sampling_params: SamplingParams) -> list[list[Response]]:
        """Return the responses of each prompt, including responses that were already complete.
        Scored responses have a teacher's log-probs.

        Raises as `parse_generate` does.
        """
        if self.scored:
            (prompt,) = self.prompts
            responses, top_k = self.scored
            found = parse_scores(answer, prompt, responses, len(prompt.token_ids), top_k)
            return [[r.with_scores(x) for r, x in zip(responses, found, strict=True)]]
        if not self.begun:
            return parse_generate(answer, self.prompts, self.n, sampling_params, self.first_routed)
        rest = iter(parse_continue(answer, self.prompts[0], self._aborted, sampling_params))
        return [[r if r.is_complete else next(rest) for r in self.begun]]

    @property
    def _aborted(self) -> list[Response]:
        return [response for response in self.begun if not response.is_complete]


def _in_files(files: ExitStack) -> Encoder:
    """Return an encoder that writes images and media to in-memory files, which `files` will close,
    and returns their paths.
    """

    def path_of(parts: Sequence[Body], begin: str = "") -> Body:
        return json.dumps(f"{begin}file://{files.enter_context(shared_file(*parts))}").encode()

    return Encoder(lambda image: path_of(image.ppm()), partial(path_of, begin=MEDIA))


async def _chunks(body: Sequence[Body]) -> AsyncIterator[Any]:
    """Yield a body in small pieces, as views and not copies. asyncio moves the rest of a piece
    after each write, so large pieces would be slow.
    """
    for part in body:
        view = memoryview(part)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def make_requests(
    prompts: Sequence["Prompt"],
    n: int,
    sampling_params: SamplingParams,
    begun: Sequence[Sequence[Response]],
    limits: RequestLimits,
    *,
    num_servers: int,
    skipped: Collection[int] = (),
) -> list[Request]:
    """Return requests for all prompts whose groups are not complete. Groups with aborted responses
    come first.

    Args:
        begun: Responses to each prompt so far.
        num_servers: Servers over which the prompts are spread.
        skipped: Indices of prompts that get no request.
    """
    continued = [
        Request([index], [prompts[index]], n, responses, limits.slots(prompts[index]))
        for index, responses in enumerate(begun)
        if any(not r.is_complete for r in responses)
    ]
    fresh = [p for p, responses in enumerate(begun) if not responses and p not in skipped]
    needed = sum(limits.slots(prompts[index]) for index in fresh)
    size = min(  # size of a request in slots
        PROMPTS_PER_REQUEST if limits.session_tokens is None else 1,  # each starts sessions
        max(1, TOKENS_PER_REQUEST // sampling_params.max_new_tokens),
        limits.concurrency,
        -(-needed // num_servers) or 1,
    )
    requests: list[Request] = []
    for index in fresh:
        slots = limits.slots(prompts[index])
        last = requests[-1] if requests else None
        if last is None or last.slots + slots > size:
            requests.append(Request([index], [prompts[index]], n, slots=slots))
        else:
            last.indices.append(index)
            last.prompts = [*last.prompts, prompts[index]]
            last.slots += slots
    return [*continued, *requests]
