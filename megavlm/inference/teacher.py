"""Client of a teacher's servers: log-probs of responses, and a check of the tokenizer."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import httpx
import orjson

from megavlm.config.distillation import Distillation
from megavlm.http_client import open_session
from megavlm.inference.answers import MALFORMED, parse_scores
from megavlm.inference.bodies import count_body, score_body
from megavlm.inference.errors import RolloutRequestError
from megavlm.inference.protocol import Response, TeacherLogprobs, bearer
from megavlm.inference.requests import RequestLimits
from megavlm.subprocess_pool.failure import CallFailure

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

logger = logging.getLogger(__name__)
T = TypeVar("T")

API_KEY = "MEGAVLM_TEACHER_API_KEY"  # environment variable
ATTEMPTS = 4  # that a server answered by an error, or not in time
LONGEST_PAUSE = 30.0  # seconds that a failed server is left out at most


class Teacher:
    """Client of the servers of `distillation.teachers.NAME`. Used within one event loop.

    Servers are asked in turn. One that fails is left out for a pause and then asked again. The
    pause grows with each further failure.
    """

    def __init__(self, settings: Distillation, name: str) -> None:
        self._settings, self._name = settings, name
        self._urls = [url.rstrip("/") for url in settings.teachers[name].urls]
        self._limits = RequestLimits(total=settings.timeout)
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._http: aiohttp.ClientSession | None = None
        self._turn = count()
        self._failures: Counter[str] = Counter()  # in a row, by server
        self._left_out = dict.fromkeys(self._urls, 0.0)  # until this time of the loop's clock
        self._takes_images: bool | None = None  # None: not asked yet
        self._image_tokens: dict[tuple[tuple[int, int], ...], int] = {}  # by the images' sizes

    async def logprobs(
        self, prompt: "Prompt", responses: Sequence[Response]
    ) -> list[TeacherLogprobs]:
        """Return the teacher's log-probs of each response to a prompt, at temperature 1.

        A request is retried after a timeout, a 5xx status or a malformed answer, at most ATTEMPTS
        times, and after a lost connection for `distillation.timeout` seconds. Raises CallFailure
        after that or if a server refuses the request, and ValueError for images that the teacher
        does not take.
        """
        top_k = self._settings.top_k
        async with self._slots:
            num_tokens = await self._num_tokens(prompt)
            body = b"".join(score_body(prompt, responses, num_tokens, top_k=top_k))

            async def ask(url: str) -> list[TeacherLogprobs]:
                answer = await self._request("POST", f"{url}/generate", body)
                return parse_scores(answer, prompt, responses, num_tokens, top_k)

            return await self._retried(ask)

    async def _num_tokens(self, prompt: "Prompt") -> int:
        """Return the number of the prompt's tokens as the teacher expands its images. Prompts with
        images of the same sizes have as many tokens of images.
        """
        if not prompt.images:
            return len(prompt.short_ids)
        if self._takes_images is None:
            self._takes_images = await self._retried(self._understands_images)
        if not self._takes_images:
            raise ValueError(
                f"{prompt.row.source} has images, but its teacher distillation.teachers."
                f"{self._name} is a model without images: name only rows without images in "
                f"distillation.teachers.{self._name}.rows"
            )
        sizes = tuple(image.shown_size for image in prompt.images)
        if sizes not in self._image_tokens:
            body = b"".join(count_body(prompt))

            async def counted(url: str) -> int:
                (item,) = await self._request("POST", f"{url}/generate", body)
                return int(item["meta_info"]["prompt_tokens"])

            self._image_tokens[sizes] = await self._retried(counted) - len(prompt.short_ids)
        return len(prompt.short_ids) + self._image_tokens[sizes]

    async def _understands_images(self, url: str) -> bool:
        answer = await self._request("GET", f"{url}/model_info")
        return bool(answer["has_image_understanding"])

    async def _retried(self, ask: Callable[[str], Awaitable[T]]) -> T:
        """Return the answer of a server to `ask`. Raises CallFailure as `logprobs` does."""
        clock = asyncio.get_running_loop().time
        begun, attempts, problem = clock(), 0, ""
        while attempts < ATTEMPTS:
            url = await self._next_server()
            try:
                found = await ask(url)
            except RolloutRequestError as error:
                problem = f"{url}: {error}"
                break
            except (aiohttp.ClientResponseError, TimeoutError, *MALFORMED) as error:
                problem = f"{url}: {type(error).__name__}: {error}"
                attempts += 1
                self._leave_out(url, problem)
            except aiohttp.ClientError as error:  # it is lost, and may come back
                problem = f"{url}: {type(error).__name__}: {error}"
                self._leave_out(url, problem)
                if clock() - begun > self._settings.timeout:
                    break
            else:
                if self._failures.pop(url, 0):
                    logger.warning("distillation.teachers.%s: %s answers again", self._name, url)
                return found
        raise CallFailure("remote", f"the teacher {self._name} gave no log-probs: {problem}"[:500])

    async def _next_server(self) -> str:
        """Return the server whose turn it is, once one may be asked."""
        now = asyncio.get_running_loop().time()
        soonest = min(self._left_out.values())
        asked = [url for url, until in self._left_out.items() if until <= max(now, soonest)]
        await asyncio.sleep(soonest - now)
        return asked[next(self._turn) % len(asked)]

    def _leave_out(self, url: str, problem: str) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._left_out[url]:  # another request has failed there since
            return
        self._failures[url] += 1
        if self._failures[url] == 1:
            logger.warning("distillation.teachers.%s: left out for now: %s", self._name, problem)
        pause = min(self._limits.pause(self._failures[url]), LONGEST_PAUSE)
        self._left_out[url] = now + pause

    async def _request(self, method: str, url: str, body: bytes | None = None) -> Any:
        if self._http is None:
            self._http = open_session(self._limits.connect, _headers())
        async with (
            asyncio.timeout(self._limits.total),
            self._http.request(method, url, data=body, allow_redirects=False) as reply,
        ):
            if 400 <= reply.status < 500:
                raise RolloutRequestError(f"HTTP {reply.status}: {(await reply.text())[:300]}")
            reply.raise_for_status()
            return orjson.loads(await reply.read())

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


def check_tokenizers(settings: Distillation, texts: Sequence[str]) -> None:
    """Raise ValueError if a teacher's server cannot be reached, or has another tokenizer.

    texts: Text of each token of the policy's tokenizer, by its id. A teacher may have more tokens.
    """
    body = {"tokens": [[token] for token in range(len(texts))], "skip_special_tokens": False}
    servers = [
        (f"distillation.teachers.{name}.urls", url)
        for name, teacher in settings.teachers.items()
        for url in teacher.urls
    ]
    # trust_env=False: no proxy between a run and its servers.
    with httpx.Client(timeout=settings.timeout, trust_env=False) as http:
        for key, url in servers:
            try:
                reply = http.post(
                    f"{url.rstrip('/')}/detokenize", content=orjson.dumps(body), headers=_headers()
                )
                reply.raise_for_status()
                theirs = reply.json()["text"]
            except (httpx.HTTPError, *MALFORMED) as error:
                raise ValueError(
                    f"{key}: {url} does not tell its tokens ({error!r}): start an SGLang server of "
                    "the teacher there"
                ) from error
            for token, (their, our) in enumerate(zip(theirs, texts, strict=True)):
                if their != our:
                    raise ValueError(
                        f"{key}: {url} has another tokenizer than model.folder, token {token} is "
                        f"{their!r} there and {our!r} here: take a teacher with the policy's "
                        "tokenizer"
                    )


def _headers() -> dict[str, str]:
    return bearer(os.environ.get(API_KEY)) | {"Content-Type": "application/json"}
