"""The control side of SGLang servers: what changes them, and what they say of themselves."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.protocol import json_object
from megavlm.inference.server_pool.targets import Target

PIECE = 2**18  # bytes
TIDY_TIMEOUT = 20.0  # seconds: a server that failed may answer nothing at all

Answers = dict[str, dict[str, Any]]  # by the server's address
T = TypeVar("T")


def control_client() -> httpx.Client:
    """Connections to servers, without a proxy between."""
    return httpx.Client(trust_env=False)


class Servers:
    """Requests to several servers at once. One that refuses or cannot be reached is lost: `lost`
    has its reason, and no later request goes to it; `mismatched` those that hold other tensors than
    they were sent. WeightSyncError, with the reasons, when none is left. Nothing is retried here,
    because a retry of one step of a push would not undo the others. `http`: a `control_client()`,
    which whoever made it closes.
    """

    def __init__(
        self, targets: Sequence[Target], *, http: httpx.Client, timeout: float = 300.0
    ) -> None:
        self._targets = {target.url: target for target in targets}
        self.lost: dict[str, str] = {}
        self.mismatched: set[str] = set()
        self._timeout = timeout
        self._http = http

    @property
    def live(self) -> list[Target]:
        return [target for url, target in self._targets.items() if url not in self.lost]

    def lose(self, url: str, reason: str) -> None:
        self.lost.setdefault(url, reason)
        if not self.live:
            raise WeightSyncError("; ".join(self.lost.values()))

    def get(self, path: str) -> Answers:
        return self._all("GET", path, {target.url: None for target in self.live})

    def post(self, path: str, body: Mapping[str, Any]) -> Answers:
        """The same body to every server."""
        return self.post_each(path, {target.url: body for target in self.live})

    def post_each(self, path: str, bodies: Mapping[str, Mapping[str, Any]]) -> Answers:
        """A body for each of some servers."""
        return self._all("POST", path, bodies)

    def read(self, path: str, answers: Answers, part: Callable[[Any], T]) -> dict[str, T]:
        """`part` of each answer to `path`; servers that answer in another form are lost."""
        parts = {}
        for url, answer in answers.items():
            try:
                parts[url] = part(answer)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                self.lose(url, f"{url}{path} answers in a form that is not SGLang's ({error!r})")
        return parts

    def _all(
        self, method: str, path: str, bodies: Mapping[str, Mapping[str, Any] | None]
    ) -> Answers:
        urls = [target.url for target in self.live if target.url in bodies]
        if not urls:
            return {}
        answers = {}
        with ThreadPoolExecutor(len(urls)) as pool:
            futures = {
                url: pool.submit(self.request, method, url, path, bodies[url]) for url in urls
            }
        for url, future in futures.items():
            try:
                answers[url] = future.result()
            except WeightSyncError as error:
                self.lose(url, str(error))
        return answers

    def request(
        self,
        method: str,
        url: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """One request, after whose failure (WeightSyncError) the server counts as before.
        `timeout`: seconds, where not as for all.
        """
        target = self._targets[url]
        key = target.api_key if method == "GET" else target.admin_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        content = b"" if body is None else json.dumps(body).encode()
        headers |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        try:
            reply = self._http.request(
                method,
                url + path,
                content=_pieces(content),
                headers=headers,
                timeout=timeout or self._timeout,
            )
        except httpx.HTTPError as error:
            raise WeightSyncError(f"{url}{path} failed: {error!r}") from error
        if not reply.is_success:
            raise WeightSyncError(f"{url}{path} ({reply.status_code}): {reply.text[:500]}")
        if not reply.headers.get("content-type", "").startswith("application/json"):
            return {}  # /flush_cache answers a sentence
        try:
            answer = json_object(reply)
        except ValueError as error:
            raise WeightSyncError(f"{url}{path}: {error}") from error
        if answer.get("success") is False:  # adapters are refused with status 200
            raise WeightSyncError(f"{url}{path}: {answer.get('error_message', answer)}")
        return answer

    def try_each(
        self, path: str, body: Mapping[str, Any], urls: Iterable[str] | None = None
    ) -> None:
        """A body to some servers, or to all, lost ones too, whatever they say to it: to tidy up."""
        for url in self._targets if urls is None else urls:
            try:
                self.request("POST", url, path, body, timeout=TIDY_TIMEOUT)
            except WeightSyncError:
                pass  # it is gone, or there was nothing to tidy up


def _pieces(content: bytes) -> Iterator[bytes]:
    """httpx copies what is left of a body each time that the connection takes a part of it: a
    bucket as one body takes ten times as long.
    """
    return (content[start : start + PIECE] for start in range(0, len(content), PIECE))
