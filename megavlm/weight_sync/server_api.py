"""Control requests to SGLang servers."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from megavlm.inference.errors import ServersFailed, WeightSyncError
from megavlm.inference.protocol import json_object
from megavlm.inference.server_pool.receivers import Receiver

PIECE = 2**18  # bytes of a request's body that are sent at a time
CLEANUP_TIMEOUT = 20.0  # seconds; short, because a failed server may not answer at all

Answers = dict[str, dict[str, Any]]  # by URL
T = TypeVar("T")


def control_client() -> httpx.Client:
    """Return an HTTP client that ignores proxy settings."""
    return httpx.Client(trust_env=False)


class Servers:
    """The servers of one attempt; requests go to all of them concurrently.

    A server that refuses a request or cannot be reached is marked as lost: `lost` has the reason,
    and no later request goes to it. `mismatched` has the URLs of servers whose tensors differ from
    the tensors sent. ServersFailed, with the reasons, is raised when no server is left. Nothing is
    retried, because retrying one step of an update would not undo the others.

    http: A `control_client()`; the caller closes it. timeout: Seconds for a request.
    """

    def __init__(
        self, receivers: Sequence[Receiver], *, http: httpx.Client, timeout: float = 300.0
    ) -> None:
        self._receivers = {receiver.url: receiver for receiver in receivers}
        self.lost: dict[str, str] = {}
        self.mismatched: set[str] = set()
        self._timeout = timeout
        self._http = http

    @property
    def live(self) -> list[Receiver]:
        return [receiver for url, receiver in self._receivers.items() if url not in self.lost]

    def lose(self, url: str, reason: str) -> None:
        """Mark a server as lost. Raises ServersFailed if none is left."""
        self.lost.setdefault(url, reason)
        if not self.live:
            raise self.failure()

    def failure(self) -> ServersFailed:
        """Return the error that names the lost servers and their reasons."""
        return ServersFailed("; ".join(self.lost.values()), self.lost, len(self.live))

    def request_each(
        self,
        path: str,
        bodies: Mapping[str, Mapping[str, Any] | None] | None = None,
        *,
        timeout: float | None = None,
    ) -> Answers:
        """Send a request to several servers concurrently. Returns the answers by URL.

        bodies: JSON body to POST, by URL; a body of None makes it a GET. If `bodies` is None, every
        server gets a GET. Lost servers are skipped. timeout: See `request`.
        """
        urls = [receiver.url for receiver in self.live if bodies is None or receiver.url in bodies]
        if not urls:
            return {}
        futures, answers = {}, {}
        with ThreadPoolExecutor(len(urls)) as pool:
            for url in urls:
                body = None if bodies is None else bodies[url]
                futures[url] = pool.submit(self.request, url, path, body, timeout=timeout)
        for url, future in futures.items():
            try:
                answers[url] = future.result()
            except WeightSyncError as error:
                self.lose(url, str(error))
        return answers

    def read(self, path: str, answers: Answers, part: Callable[[Any], T]) -> dict[str, T]:
        """Return `part` of each answer to `path`. Servers whose answer has another form are marked
        as lost.
        """
        parts = {}
        for url, answer in answers.items():
            try:
                parts[url] = part(answer)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                self.lose(url, f"{url}{path} answered in a form that is not SGLang's ({error!r})")
        return parts

    def request(
        self,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Send one request: a POST of `body`, or a GET without one.

        timeout: Seconds for this request; None takes the default of all requests. Raises
        WeightSyncError if the request fails; the server is not marked as lost.
        """
        receiver = self._receivers[url]
        key = receiver.api_key if body is None else receiver.admin_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        content = b"" if body is None else json.dumps(body).encode()
        headers |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        try:
            reply = self._http.request(
                "GET" if body is None else "POST",
                url + path,
                content=_pieces(content),
                headers=headers,
                timeout=timeout or self._timeout,
            )
        except httpx.HTTPError as error:
            raise WeightSyncError(f"{url}{path} failed: {error!r}") from error
        if not reply.is_success:
            raise WeightSyncError(
                f"{url}{path} returned HTTP {reply.status_code}: {reply.text[:500]}"
            )
        if not reply.headers.get("content-type", "").startswith("application/json"):
            return {}  # /flush_cache answers in plain text
        try:
            answer = json_object(reply)
        except ValueError as error:
            raise WeightSyncError(f"{url}{path}: {error}") from error
        if answer.get("success") is False:  # SGLang refuses an adapter with HTTP 200
            raise WeightSyncError(f"{url}{path}: {answer.get('error_message', answer)}")
        return answer

    def try_each(
        self, path: str, body: Mapping[str, Any], urls: Iterable[str] | None = None
    ) -> None:
        """Send a request to some servers (default: all, including lost ones) and ignore
        failures.
        """
        for url in self._receivers if urls is None else urls:
            try:
                self.request(url, path, body, timeout=CLEANUP_TIMEOUT)
            except WeightSyncError:
                pass  # the server is gone, or there was nothing to clean up


def _pieces(content: bytes) -> Iterator[bytes]:
    """Split a request's body into pieces.

    httpx copies the rest of a body each time the connection accepts a part of it, so that a bucket
    sent as one piece takes ten times as long.
    """
    return (content[start : start + PIECE] for start in range(0, len(content), PIECE))
