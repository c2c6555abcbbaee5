"""Rollout client: generates responses to prompts on all servers concurrently."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp

from megavlm.http_client import open_session
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.generation import GenerationBatch, OnComplete
from megavlm.inference.kept_images import SentImages
from megavlm.inference.live_sessions import LiveSessions
from megavlm.inference.protocol import Response, SamplingParams, Scored
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server_pool.routing import Routing

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

DEFAULT_LIMITS = RequestLimits()
T = TypeVar("T")


class RolloutClient:
    """Client of the rollout servers, a context manager. Requests and their followers run on the
    asyncio `runner`. Connections are kept open.

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
        self._batches: list[GenerationBatch] = []
        self.sent_images = SentImages()
        self._sessions = LiveSessions(limits.session_tokens)
        self.runner = asyncio.Runner()
        self._http: aiohttp.ClientSession | None = None

    async def generate(
        self,
        prompts: Sequence["Prompt"],
        *,
        n: int,
        sampling_params: SamplingParams,
        weight_version: int | str | None = None,
        accepts: Callable[[str], bool] | None = None,
        refit: Callable[[], Awaitable[None]] | None = None,
        groups: Sequence[list[Response]] | None = None,
        agents: int = 0,
        on_complete: OnComplete | None = None,
        skip_timed_out: bool = False,
        scored: Scored | None = None,
    ) -> list[list[Response]]:
        """Return n responses to each prompt, in the order of the prompts. Runs in `runner`; several
        calls may run at the same time.

        Args:
            weight_version: Weight version that must generate the responses; None accepts any.
            accepts: Function that returns True for weight versions that may answer, for responses
                that go on while weights are pushed. weight_version is then None.
            refit: Waits for a weight push. It is called when no server has the weights and a server
                that answers could get them; responses so far are kept.
            groups: Responses to each prompt so far, lists that are filled in place; aborted
                responses are continued.
            agents: Number of agents of each group, which ask for all of its responses; n is then 0.
            on_complete: Runs for each group as soon as it is complete, with the index of its
            prompt, its
                responses, and a function that returns a response to another prompt.
            skip_timed_out, scored: See GenerationBatch; the first needs `on_complete`.

        Raises RolloutRequestError if a server refuses a request or counts a different number of
        prompt tokens than the trainer, RolloutServerError if all attempts failed or too few servers
        are left, and the errors of `on_complete`.
        """
        if self._http is None:
            self._http = open_session(self.limits.connect)
        version = None if weight_version is None else str(weight_version)
        batch = GenerationBatch(
            prompts=list(prompts),
            groups=[[] for _ in prompts] if groups is None else list(groups),
            n=n,
            sampling_params=sampling_params,
            version=version,
            accepts=accepts,
            agents=agents,
            on_complete=on_complete,
            skip_timed_out=skip_timed_out,
            scored=scored,
            routing=self._routing,
            http=self._http,
            limits=self.limits,
            show=self._show,
            beat=self._beat,
            loads=self._loads,
            sent_images=self.sent_images,
            sessions=self._sessions,
            peers=self._batches,
        )
        self._batches.append(batch)
        try:
            while not await batch.run():
                if not batch.resumed.is_set():
                    await batch.resumed.wait()
                elif refit is not None:
                    await refit()
                else:
                    raise RolloutServerError(
                        f"no rollout server has weight version {version}: one restarted, or "
                        "another process changed its weights"
                    )
        finally:
            self._batches.remove(batch)
            await batch.close()
        return batch.groups[: len(prompts)]

    async def pause(self) -> None:
        """Abort all requests in flight, keep their tokens, and send none until `resume`."""
        await asyncio.gather(*(batch.pause() for batch in self._batches))

    def resume(self) -> None:
        """Go on after `pause`."""
        for batch in self._batches:
            batch.resumed.set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in `runner` and return its result. It is cancelled if a signal interrupts
        it.
        """
        task = self.runner.get_loop().create_task(work)
        try:
            return self.runner.run(asyncio.wait_for(task, None))
        finally:
            if not task.done():
                task.cancel()
                self.runner.run(asyncio.wait({task}))

    def sample_by(self, sampling_params: SamplingParams) -> None:
        """Use `sampling_params` in all requests sent from now on."""
        for batch in self._batches:
            batch.sampling_params = sampling_params

    @property
    def is_idle(self) -> bool:
        """True if no request is in flight."""
        return not any(self._loads.values())

    def close(self) -> None:
        if self._http is not None:
            self.runner.run(self._http.close())
        self.runner.close()

    def __enter__(self) -> "RolloutClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
