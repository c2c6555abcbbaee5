"""Rewards that a service computes: any URL, or a reward model behind an OpenAI-compatible endpoint.

Every request is bounded: in time, in the size of the answer, in attempts, and in how many are in
flight. Redirects are not followed, proxies not used.
"""

import asyncio
import base64
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from megavlm.rewards.base import Example, RewardFailure

MAX_REPLY = 2**18
CONNECT_SECONDS = 10.0
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
MODEL_PROMPT = (
    "Rate how well the response answers the request about the picture, from 0 (wrong) to {scale} "
    "(perfect). Reply with the number alone.\nRequest: {problem}\nResponse: {response}"
)


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """`attempts`: at connection errors, time-outs and 5xx. `api_key_env`: the environment variable
    with the service's key. `delay`: longest first pause between attempts, seconds. The others are
    of a reward model: what it is asked, and the rating that means 1.
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
        """Raises ValueError, in one sentence, for an unknown option or an unusable URL."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(names))
        if unknown or "url" not in options:
            problem = f"has no {unknown[0]!r}" if unknown else "needs a url"
            raise ValueError(f"the reward service {problem}: its options are {', '.join(names)}")
        made = cls(**options)
        parts = urlsplit(made.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError(
                f"the reward service's url {made.url!r} cannot be used: write "
                "http://HOST:PORT/PATH without a name or password (keys come from the environment)"
            )
        return made


class RemoteReward:
    """Used within one event loop."""

    def __init__(self, options: RemoteOptions, *, is_model: bool, timeout: float) -> None:
        self._options, self._is_model, self._timeout = options, is_model, timeout
        self._slots = asyncio.Semaphore(options.concurrency)
        self._http: httpx.AsyncClient | None = None

    async def score(self, response: str, example: Example) -> dict[str, Any]:
        """{reward, correct, parts}; raises RewardFailure."""
        if self._is_model:
            return self._rating(await self._post(self._question(response, example)))
        body = {
            "response": response,
            "row": example.columns(),
            "images": [data_url(image) for image in example.images],
        }
        answer = await self._post(body)
        if not isinstance(answer, dict) or not isinstance(answer.get("reward"), int | float):
            raise RewardFailure("remote", f"{self._options.url} sent no reward")
        correct = answer.get("correct")
        return {
            "reward": float(answer["reward"]),
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
        pictures = [
            {"type": "image_url", "image_url": {"url": data_url(image)}} for image in example.images
        ]
        content = [*pictures, {"type": "text", "text": text}]
        return {
            "model": self._options.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 32,
        }

    def _rating(self, answer: Any) -> dict[str, Any]:
        try:
            found = _NUMBER.search(answer["choices"][0]["message"]["content"][:1000])
        except (KeyError, IndexError, TypeError) as error:
            raise RewardFailure("remote", f"{self._options.url} sent no chat answer") from error
        if found is None:
            raise RewardFailure("remote", f"{self._options.url} rated by no number")
        reward = min(max(float(found[0]) / self._options.scale, 0.0), 1.0)
        return {"reward": reward, "correct": reward >= self._options.correct_from, "parts": {}}

    async def _post(self, body: Any) -> Any:
        problem: Any = None
        content = json.dumps(body, default=str).encode()
        async with self._slots:
            for attempt in range(self._options.attempts):
                if attempt:
                    longest = self._options.delay * 2 ** (attempt - 1)
                    await asyncio.sleep(longest * secrets.SystemRandom().random())
                try:
                    async with asyncio.timeout(self._timeout):
                        return await self._once(content)
                except TimeoutError:
                    problem = f"no answer in {self._timeout:g} s"
                except httpx.HTTPError as error:
                    problem = repr(error)
        raise RewardFailure("remote", f"{self._options.url}: {problem}")

    async def _once(self, content: bytes) -> Any:
        async with self._client().stream("POST", self._options.url, content=content) as reply:
            if reply.is_server_error:
                reply.raise_for_status()
            if reply.status_code != httpx.codes.OK:  # our mistake, or a redirect
                raise RewardFailure("remote", f"{self._options.url} said {reply.status_code}")
            parts = bytearray()
            async for data in reply.aiter_bytes():
                parts += data
                if len(parts) > MAX_REPLY:
                    raise RewardFailure("remote", f"more than {MAX_REPLY} bytes of answer")
        try:
            return json.loads(parts)
        except ValueError as error:
            raise RewardFailure("remote", f"{self._options.url} sent no JSON") from error

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            headers = {"Content-Type": "application/json"}
            if key := os.environ.get(self._options.api_key_env):
                headers["Authorization"] = f"Bearer {key}"
            self._http = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(self._timeout, connect=CONNECT_SECONDS),
                follow_redirects=False,
                trust_env=False,
            )
        return self._http

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()


def data_url(picture: bytes) -> str:
    kind = next((kind for magic, kind in _MAGIC.items() if picture.startswith(magic)), "png")
    return f"data:image/{kind};base64," + base64.b64encode(picture).decode("ascii")
