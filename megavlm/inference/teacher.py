"""Client of a teacher's servers: log-probs of responses, and a check of the tokenizer."""

import asyncio
import os
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
import orjson

from megavlm.config.distillation import Distillation
from megavlm.http_client import open_session
from megavlm.inference.answers import MALFORMED, parse_scores
from megavlm.inference.bodies import score_body
from megavlm.inference.errors import RolloutRequestError
from megavlm.inference.protocol import Response, TeacherLogprobs, bearer
from megavlm.inference.requests import RequestLimits
from megavlm.subprocess_pool.failure import CallFailure

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

API_KEY = "MEGAVLM_TEACHER_API_KEY"  # environment variable
ATTEMPTS = 4


class Teacher:
    """Client of the servers in `distillation.urls`, in turn. Used within one event loop."""

    def __init__(self, settings: Distillation) -> None:
        self._settings, self._turn = settings, count()
        self._limits = RequestLimits(total=settings.timeout)
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._http: aiohttp.ClientSession | None = None

    async def logprobs(
        self, prompt: "Prompt", responses: Sequence[Response]
    ) -> list[TeacherLogprobs]:
        """Return the teacher's log-probs of each response to a prompt.

        A request is retried after a connection error, a timeout, a 5xx status or a malformed
        answer. Raises CallFailure if all attempts failed or a server refuses the request.
        """
        top_k = self._settings.top_k
        body, problem = b"".join(score_body(prompt, responses, top_k=top_k)), ""
        async with self._slots:
            for attempt in range(ATTEMPTS):
                if attempt:
                    await asyncio.sleep(self._limits.pause(attempt))
                url = self._settings.urls[next(self._turn) % len(self._settings.urls)]
                try:
                    answer = await self._post(f"{url.rstrip('/')}/generate", body)
                    return parse_scores(answer, prompt, responses, top_k)
                except (aiohttp.ClientError, TimeoutError, *MALFORMED) as error:
                    problem = f"{url}: {type(error).__name__}: {error}"
                except RolloutRequestError as error:
                    problem = f"{url}: {error}"
                    break
        raise CallFailure("remote", f"the teacher gave no log-probs: {problem}"[:500])

    async def _post(self, url: str, body: bytes) -> Any:
        if self._http is None:
            self._http = open_session(self._limits.connect, _headers())
        async with (
            asyncio.timeout(self._limits.total),
            self._http.post(url, data=body, allow_redirects=False) as reply,
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

    texts: Text of each token of the policy's tokenizer, by its id.
    """
    body = {"tokens": [[token] for token in range(len(texts))], "skip_special_tokens": False}
    # trust_env=False: no proxy between a run and its servers.
    with httpx.Client(timeout=settings.timeout, trust_env=False) as http:
        for url in settings.urls:
            try:
                reply = http.post(
                    f"{url.rstrip('/')}/detokenize", content=orjson.dumps(body), headers=_headers()
                )
                reply.raise_for_status()
                theirs = reply.json()["text"]
            except (httpx.HTTPError, *MALFORMED) as error:
                raise ValueError(
                    f"distillation.urls: {url} does not tell its tokens ({error!r}): start an "
                    "SGLang server of the teacher there"
                ) from error
            for token, (their, our) in enumerate(zip(theirs, texts, strict=True)):
                if their != our:
                    raise ValueError(
                        f"distillation.urls: {url} has another tokenizer than model.folder, token "
                        f"{token} is {their!r} there and {our!r} here: take a teacher with the "
                        "policy's tokenizer"
                    )


def _headers() -> dict[str, str]:
    return bearer(os.environ.get(API_KEY)) | {"Content-Type": "application/json"}
