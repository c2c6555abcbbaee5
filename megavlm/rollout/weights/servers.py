"""The control side of SGLang servers: what changes them, and what they say of themselves."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from megavlm.rollout.errors import WeightSyncError


class Servers:
    """Requests that go to every server at once. A refusal or a lost connection is a WeightSyncError
    that names the server and its reason; nothing is retried here, because a retry of one step of a
    push would not undo the others.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None,
        admin_key: str | None,
        timeout: float = 300.0,
    ) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._read = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._write = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._http = httpx.Client(timeout=timeout, trust_env=False)

    def get(self, path: str) -> list[dict[str, Any]]:
        """Every server's answer, in the order of `urls`."""
        return self._all("GET", path, self._read, [None] * len(self.urls))

    def post(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The same body to every server."""
        return self.post_each(path, [body] * len(self.urls))

    def post_each(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A body for each server."""
        return self._all("POST", path, self._write, bodies)

    def _all(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        bodies: Sequence[Mapping[str, Any] | None],
    ) -> list[dict[str, Any]]:
        def one(url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
            try:
                reply = self._http.request(method, url + path, json=body, headers=headers)
            except httpx.HTTPError as error:
                raise WeightSyncError(f"{url}{path} failed: {error!r}") from error
            if not reply.is_success:
                raise WeightSyncError(f"{url}{path} ({reply.status_code}): {reply.text[:500]}")
            if not reply.headers.get("content-type", "").startswith("application/json"):
                return {}  # /flush_cache answers a sentence
            answer: dict[str, Any] = reply.json()
            return answer

        with ThreadPoolExecutor(len(self.urls)) as pool:
            return list(pool.map(one, self.urls, bodies))
