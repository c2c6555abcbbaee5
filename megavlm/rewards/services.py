"""Rewards that a service computes: any URL, or a reward model behind an OpenAI-compatible endpoint.

The time of a request, the size of its answer, the attempts and the requests in flight are limited.
Redirects are not followed, and proxies are not used.
"""

import asyncio
import base64
import json
import os
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from megavlm.http_client import open_session
from megavlm.rewards.base import Example
from megavlm.rewards.boxed import after_thinking
from megavlm.rewards.options import check_number
from megavlm.rewards.words import ASCII_SIGNS
from megavlm.subprocess_pool.failure import CallFailure
from megavlm.subprocess_pool.wire import json_bytes

MAX_SERVICE_REPLY = 2**18
CONNECT_SECONDS = 10.0
MAX_PAUSE = 30.0  # most seconds before another attempt, even if the service asks for more
MAX_RATING_TOKENS = 1024  # including thoughts
_UNFINISHED = ("length", "content_filter", "abort")  # finish reasons of incomplete answers
_NUMBER = r"(?<![\w.])-?[0-9]+(?:\.[0-9]+)?(?![\w])"
# "7-8", "7 or 8", "4/5", "80%" and "7,5" must not be read as the number at their beginning.
_GOES_ON = re.compile(r"\s*(?:%|(?:[-/]|to|or|out of)\s*[0-9])|[.,][0-9]")
# "Score: 7", "**Rating:** 7/10", {"score": 7}
_LABELLED = re.compile(
    rf"\b(?:score|rating)\b[\s*_\"'`]{{0,8}}[:=][\s*_\"'`]{{0,8}}({_NUMBER})", re.I
)
_FIELDS = ("scale", "problem", "answer", "response")
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
MODEL_PROMPT = (
    "Rate how well the response answers the request about the image, from 0 (wrong) to {scale} "
    "(perfect). Reply with the number alone.\nRequest: {problem}\nResponse: {response}"
)


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Options of a reward service.

    attempts: number of attempts after connection errors, time-outs, 429 and 5xx. api_key_env:
    environment variable with the service's key. delay: longest first pause between attempts, in
    seconds. concurrency: requests in flight. Only for a reward model: prompt, with the placeholders
    {problem}, {answer}, {response} and {scale}; scale, the rating that gives a reward of 1; and
    correct_from. The model replies, after its thoughts, with only the rating or with "Score: 7".
    """

    url: str
    attempts: int = 3
    delay: float = 0.5
    concurrency: int = 32
    api_key_env: str = "MEGAVLM_REWARD_API_KEY"
    model: str = ""
    prompt: str = MODEL_PROMPT
    scale: float = 10.0
    correct_from: float = 0.5

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the checked options. Raises ValueError for a missing or bad URL, and for other
        values that cannot be used.
        """
        if "url" not in options:
            raise ValueError("the reward service needs a url")
        for name in ("url", "model", "prompt", "api_key_env"):
            if not isinstance(options.get(name, ""), str):
                raise ValueError(f"the reward service's {name} is {options[name]!r}: give a text")
        made = cls(**options)
        for name, most in (("attempts", 10), ("concurrency", 4096)):
            if not isinstance(getattr(made, name), int):
                raise ValueError(
                    f"the reward service's {name} is {getattr(made, name)!r}: give a whole number"
                )
            check_number(f"the reward service's {name}", getattr(made, name), least=1, most=most)
        check_number("the reward service's delay", made.delay, least=0, most=MAX_PAUSE)
        check_number("the reward model's scale", made.scale, above=0)
        check_number("the reward model's correct_from", made.correct_from)
        _check_prompt(made.prompt)
        _check_url(made.url)
        return made


def _check_prompt(prompt: str) -> None:
    try:
        used = {name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None}
        prompt.format(**dict.fromkeys(_FIELDS, ""))
    except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(_PROMPT.format(repr(str(error)))) from error
    if unknown := used - set(_FIELDS):
        raise ValueError(_PROMPT.format(sorted(unknown)[0]))


_PROMPT = (
    "the reward model's prompt cannot be filled in ({}): its fields are {{"
    + "}}, {{".join(_FIELDS)
    + "}}, and other braces are doubled"
)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.port != 0 and parts.hostname and "@" not in parts.netloc
    except ValueError:  # a port above 65535, or a broken address
        usable = False
    if not usable or parts.scheme not in ("http", "https"):
        raise ValueError(
            f"the reward service's url {url!r} cannot be used: write "
            "http://HOST:PORT/PATH without a name or password (keys come from the environment)"
        )


class RemoteReward:
    """Reward that a service computes. Used within one event loop."""

    def __init__(self, options: RemoteOptions, *, is_model: bool, timeout: float) -> None:
        self._options, self._is_model, self._timeout = options, is_model, timeout
        self._slots = asyncio.Semaphore(options.concurrency)
        self._http: aiohttp.ClientSession | None = None

    async def score(self, response: str, example: Example) -> dict[str, Any]:
        """Return {reward, correct, parts}. Raises CallFailure."""
        if self._is_model:
            return self._rating(await self._post(self._question(response, example)))
        body = {
            "response": response,
            "row": example.columns(),
            "images": [data_url(image) for image in example.images],
        }
        answer = await self._post(body)
        if not isinstance(answer, dict) or not isinstance(answer.get("reward"), int | float):
            raise CallFailure("remote", f"{self._options.url} sent no reward")
        correct = answer.get("correct")
        return {
            "reward": answer["reward"],
            "correct": None if correct is None else bool(correct),
            "parts": {},
        }

    def _question(self, response: str, example: Example) -> dict[str, Any]:
        text = self._options.prompt.format(
            scale=f"{self._options.scale:g}",
            problem=example.problem.replace("<image>", ""),
            answer=example.answer,
            response=response,
        )
        images = [
            {"type": "image_url", "image_url": {"url": data_url(image)}} for image in example.images
        ]
        content = [*images, {"type": "text", "text": text}]
        return {
            "model": self._options.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": MAX_RATING_TOKENS,
        }

    def _rating(self, answer: Any) -> dict[str, Any]:
        url, scale = self._options.url, self._options.scale
        try:
            text = answer["choices"][0]["message"]["content"]
            finish = answer["choices"][0].get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CallFailure("remote", f"{url} sent no chat answer") from error
        if finish in _UNFINISHED:
            raise CallFailure("remote", f"{url} did not finish its rating: {finish}")
        rating = _rating_in(text, scale) if isinstance(text, str) else None
        if rating is None or not 0 <= rating <= scale:
            raise CallFailure("remote", f"{url} sent no single rating from 0 to {scale:g}")
        reward = rating / scale
        return {"reward": reward, "correct": reward >= self._options.correct_from, "parts": {}}

    async def _post(self, body: Any) -> Any:
        problem = _TryAgain("")
        content = json_bytes(body)
        async with self._slots:
            for attempt in range(self._options.attempts):
                if attempt:
                    longest = self._options.delay * 2 ** (attempt - 1)
                    # It is random, so that requests that failed together do not return together.
                    pause = longest * secrets.SystemRandom().random()
                    await asyncio.sleep(min(max(pause, problem.pause), MAX_PAUSE))
                try:
                    async with asyncio.timeout(self._timeout):
                        return await self._once(content)
                except aiohttp.ClientError as error:
                    problem = _TryAgain(f"{type(error).__name__}: {error}")
                except TimeoutError:
                    problem = _TryAgain(f"no answer in {self._timeout:g} s")
                except _TryAgain as error:
                    problem = error
        raise CallFailure("remote", f"{self._options.url}: {problem}")

    async def _once(self, content: bytes) -> Any:
        async with self._session().post(
            self._options.url, data=content, allow_redirects=False
        ) as reply:
            if reply.status >= 500 or reply.status == HTTPStatus.TOO_MANY_REQUESTS:
                wait = reply.headers.get("Retry-After", "")  # seconds; dates are not read
                pause = float(wait) if re.fullmatch(r"[0-9]{1,6}", wait) else 0.0
                raise _TryAgain(f"HTTP {reply.status}", pause)
            if reply.status != HTTPStatus.OK:  # an error on our side, or a redirect
                raise CallFailure("remote", f"{self._options.url} returned HTTP {reply.status}")
            parts = bytearray()
            async for data in reply.content.iter_any():
                parts += data
                if len(parts) > MAX_SERVICE_REPLY:
                    raise CallFailure("remote", f"more than {MAX_SERVICE_REPLY} bytes of answer")
        try:
            return json.loads(parts)
        except ValueError as error:
            raise CallFailure("remote", f"{self._options.url} sent no JSON") from error

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            headers = {"Content-Type": "application/json"}
            if key := os.environ.get(self._options.api_key_env):
                headers["Authorization"] = f"Bearer {key}"
            self._http = open_session(CONNECT_SECONDS, headers)
        return self._http

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


class _TryAgain(Exception):
    """Failure after which the request is retried. pause: seconds that the service asks to wait."""

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


def _rating_in(text: str, scale: float) -> float | None:
    """Return the number after the last "score:" or "rating:", or the only number. "7/10" and "7 out
    of 10" are 7. Thoughts are ignored.
    """
    text = after_thinking(text).translate(ASCII_SIGNS).strip()[-1000:]
    whole = rf"(?:/|out of)\s*{scale:g}(?!\w|\.\d)" + ("|%" if scale == 100 else "")
    text = re.sub(rf"\s*(?:{whole})", " ", text)
    numbers = list(_LABELLED.finditer(text))[-1:] or list(re.finditer(f"({_NUMBER})", text))
    if len(numbers) != 1 or _GOES_ON.match(text, numbers[0].end()):
        return None
    return float(numbers[0][1])


def data_url(image: bytes) -> str:
    kind = next((kind for magic, kind in _MAGIC.items() if image.startswith(magic)), "png")
    return f"data:image/{kind};base64," + base64.b64encode(image).decode("ascii")
