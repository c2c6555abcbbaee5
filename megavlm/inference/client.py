"""Rollout client: generates responses to prompts on all servers concurrently."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import httpx

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.generation import Follow, GenerationBatch
from megavlm.inference.protocol import Response, Sampling
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server_pool.routing import Routing

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

DEFAULT_LIMITS = RequestLimits()


class RolloutClient:
    """Client of the rollout servers, a context manager. Its interface is synchronous; requests and
    their followers run on the asyncio `runner`. Connections are kept open.

    A request is retried after a connection error, a timeout, a 5xx status or a malformed response,
    at another server if there is one, and at most ATTEMPTS times. Generation does not change a
    server's state, so no response is lost or duplicated. A 4xx status is the client's mistake and
    is not retried.
    """

    def __init__(
        self,
        routing: Routing,
        limits: RequestLimits = DEFAULT_LIMITS,
        show: Callable[[str], object] = lambda line: None,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare the connections. show: Callback for a progress line. beat: Callback for each
        response.
        """
        self._routing, self.limits, self._show, self._beat = routing, limits, show, beat
        self._loads: Counter[str] = Counter()
        self._peers: list[GenerationBatch] = []
        self.runner = asyncio.Runner()
        # trust_env=False uses no proxy between the trainer and its servers. Connections need no
        # limit, because `concurrency` limits the requests in flight.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(limits.total, connect=limits.connect),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

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
        follow: Follow | None = None,
        skip_timed_out: bool = False,
    ) -> list[list[Response]]:
        """Return n responses to each prompt, in the order of the prompts.

        Args:
            weight_version: Weight version that must generate the responses; None accepts any.
            refit: Function that pushes the weights. It is called when no server has them and a
                server that answers could get them; responses so far are kept.
            begun: Responses that earlier calls have for each prompt; aborted ones are continued.
            enough: Number of complete groups after which the rest is aborted. Some groups then
                have aborted responses, and some may be empty.
            follow: Runs for each of these groups as soon as it is complete, with the index of its
                prompt, its responses, and a function that returns a response to another prompt.
            skip_timed_out: See GenerationBatch; it needs `follow`.

        Raises RolloutRequestError if a server refuses a request or counts a different number of
        prompt tokens than the trainer, RolloutServerError if all attempts failed or too few servers
        are left, and the errors of `follow`.
        """
        version = None if weight_version is None else str(weight_version)
        batch = self._batch(
            prompts,
            [list(group) for group in begun or [()] * len(prompts)],
            n=n,
            sampling=sampling,
            version=version,
            wanted=len(prompts) if enough is None else min(enough, len(prompts)),
            follow=follow,
            skip_timed_out=skip_timed_out,
        )
        try:
            while not self.runner.run(batch.run()):
                if refit is None:
                    raise RolloutServerError(
                        f"no rollout server has weight version {version}: one restarted, or "
                        "another process changed its weights"
                    )
                refit()
        finally:
            self.runner.run(batch.close())
        return batch.groups[: len(prompts)]

    async def generate_ahead(
        self,
        prompts: Sequence["Prompt"],
        *,
        n: int,
        sampling: Sampling,
        accepts: Callable[[str], bool],
        refit: Callable[[], Awaitable[None]],
        groups: list[list[Response]],
        follow: Follow,
        skip_timed_out: bool = False,
    ) -> None:
        """Generate n responses to each prompt, also while weights are pushed. Runs in `runner`;
        several calls may run at the same time.

        Args:
            accepts: Function that returns True for weight versions that may answer.
            refit: Waits for a push, when no server can answer without one.
            groups: Responses to each prompt so far, filled in place.
            follow: As in `generate`, for all groups.
            skip_timed_out: See GenerationBatch.

        Raises as `generate` does.
        """
        batch = self._batch(
            prompts,
            groups,
            n=n,
            sampling=sampling,
            wanted=len(prompts),
            accepts=accepts,
            follow=follow,
            skip_timed_out=skip_timed_out,
        )
        try:
            while not await batch.run():
                await refit()
        finally:
            await batch.close()

    def _batch(
        self, prompts: Sequence["Prompt"], groups: list[list[Response]], **options: Any
    ) -> GenerationBatch:
        return GenerationBatch(
            prompts=list(prompts),
            groups=groups,
            routing=self._routing,
            http=self._http,
            limits=self.limits,
            show=self._show,
            beat=self._beat,
            loads=self._loads,
            peers=self._peers,
            **options,
        )

    def sample_by(self, sampling: Sampling) -> None:
        """Use `sampling` in all requests sent from now on."""
        for batch in self._peers:
            batch.sampling = sampling

    @property
    def is_idle(self) -> bool:
        """True if no request is in flight."""
        return not any(self._loads.values())

    def close(self) -> None:
        self.runner.run(self._http.aclose())
        self.runner.close()

    def __enter__(self) -> "RolloutClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
