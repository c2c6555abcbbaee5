"""Prompts in, responses out: many requests at once to the servers that may answer them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from megavlm.inference.exchange import Exchange, Limits
from megavlm.inference.generation import Rollout
from megavlm.inference.protocol import Response, Sampling, is_complete
from megavlm.inference.server_pool.routing import FixedServers, Routing
from megavlm.observability.progress import Progress

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt


class RolloutClient:
    """Asynchronous inside, synchronous outside; its connections are kept until `close`.

    servers: a fleet, or addresses that nobody watches, with their `api_key` and `admin_key`.
    timeout: seconds that one request may take in all; body_timeout: from the head of its answer on,
    which comes when all tokens are sampled. concurrency: prompts in flight at each
    server. retry_delay: longest first pause before a retry, seconds; it doubles, and each pause is
    a random part of it.

    A connection error, a time-out, a 5xx status or a malformed answer is retried, on another server
    if there is one, a bounded number of times; generation changes nothing on a server, so no
    response is lost or doubled. A 4xx status is our own mistake and is not retried.
    """

    def __init__(
        self,
        servers: Routing | Sequence[str],
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout: float = 300.0,
        body_timeout: float = 60.0,
        concurrency: int = 64,
        retry_delay: float = 1.0,
    ) -> None:
        if isinstance(servers, Sequence):
            servers = FixedServers(servers, api_key, admin_key)
        self._routing: Routing = servers
        self._concurrency = concurrency
        self._limits = Limits(total=timeout, body=body_timeout, retry_delay=retry_delay)
        self._runner = asyncio.Runner()
        self._exchange: Exchange | None = None

    def generate(
        self,
        prompts: Sequence["Prompt"],
        *,
        n: int,
        sampling: Sampling,
        weight_version: int | str | None = None,
        refit: Callable[[], object] | None = None,
        begun: Sequence[Sequence[Response]] | None = None,
        enough: int | None = None,
    ) -> list[list[Response]]:
        """n responses to each prompt, in the order of the prompts.

        weight_version: of the weights that must answer; None: of any. refit: called where no server
        has them and one that answers could get them; what has been answered is kept.
        begun: what earlier calls have of each prompt's group; its aborted responses are gone on
        with. enough: complete groups after which the rest is aborted; then some groups hold
        aborted responses, and some may be empty.

        Raises RolloutRequestError when a server refuses a request or counts other prompt tokens
        than we do, RolloutServerError when no attempt came through or no server is left.
        """
        version = None if weight_version is None else str(weight_version)
        groups = [list(group) for group in begun] if begun is not None else [[] for _ in prompts]
        wanted = len(prompts) if enough is None else min(enough, len(prompts))
        attempts: Counter[int] = Counter()
        with Progress() as progress:
            while sum(map(is_complete, groups)) < wanted:
                rollout = Rollout(
                    prompts,
                    groups,
                    n=n,
                    sampling=sampling,
                    version=version,
                    wanted=wanted,
                    routing=self._routing,
                    concurrency=self._concurrency,
                    progress=progress,
                    attempts=attempts,
                )
                if self._runner.run(self._run(rollout)):
                    break
                if refit is None:
                    raise rollout.unfit()
                refit()
        return groups

    async def _run(self, rollout: Rollout) -> bool:
        if self._exchange is None:
            self._exchange = Exchange(self._limits)
        return await rollout.run(self._exchange)

    def close(self) -> None:
        if self._exchange is not None:
            self._runner.run(self._exchange.close())
            self._exchange = None
        self._runner.close()

    def __enter__(self) -> "RolloutClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
