"""One rollout: requests in flight at the servers that may answer them, until enough is answered."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megavlm.inference.balance import choose
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.exchange import ATTEMPTS, Exchange, Failed
from megavlm.inference.protocol import Response, Sampling, is_complete
from megavlm.inference.requests import Request, make_requests
from megavlm.inference.server_pool.routing import Address, Outlook, Routing
from megavlm.observability.progress import Progress

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

LOOK_EVERY = 0.5  # seconds between looks at what no event tells
ABORT_PATIENCE = 30.0  # seconds in which aborted requests must answer

Answer = asyncio.Task[list[list[Response]]]


class Rollout:
    """Fills `groups`, in place: a group is complete, partly aborted, or empty.

    version: of the weights that must answer; None: of any. wanted: complete groups after which the
    rest is aborted; equal to the number of prompts where nothing is. attempts: failed, by place,
    those of earlier rollouts for the same groups among them.
    """

    def __init__(
        self,
        prompts: Sequence["Prompt"],
        groups: list[list[Response]],
        *,
        n: int,
        sampling: Sampling,
        version: str | None,
        wanted: int,
        routing: Routing,
        concurrency: int,
        progress: Progress,
        attempts: Counter[int],
    ) -> None:
        self._prompts, self._groups, self._n = prompts, groups, n
        self._sampling, self._version, self._wanted = sampling, version, wanted
        self._routing, self._concurrency, self._progress = routing, concurrency, progress
        self._waiting: deque[Request] = deque()
        self._running: dict[Answer, tuple[Request, Address]] = {}
        self._attempts = attempts
        self._loads: Counter[str] = Counter()  # prompts in flight by server
        self._tokens = 0
        self._aborting = False

    async def run(self, exchange: Exchange) -> bool:
        """True when enough groups are complete; False where only a refit can help."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._limits, self._started = exchange.limits, time.monotonic()
        with self._routing.in_use(partial(loop.call_soon_threadsafe, changed.set)):
            try:
                self._waiting.extend(self._requests())
                while self._num_complete < self._wanted:
                    changed.clear()
                    self._move_lost()
                    self._send(exchange)
                    if not self._running and self._needs_refit():
                        return False
                    await self._wait(changed)
                    self._collect()
                    self._progress.show(self._line())
                if self._running:
                    await self._abort(exchange)
                return True
            finally:
                for task in self._running:
                    task.cancel()
                await asyncio.gather(*self._running, return_exceptions=True)

    def unfit(self) -> RolloutServerError:
        return RolloutServerError(
            f"no rollout server has weight version {self._version}; one was restarted or changed "
            "behind the trainer's back"
        )

    def _requests(self) -> list[Request]:
        return make_requests(
            self._prompts,
            self._n,
            self._sampling,
            self._groups,
            num_servers=max(len(self._routing.routable(self._version)), 1),
            concurrency=self._concurrency,
            single=self._wanted < len(self._prompts),
        )

    @property
    def _num_complete(self) -> int:
        return sum(map(is_complete, self._groups))

    def _send(self, exchange: Exchange) -> None:
        """As much of what waits as the servers may have in flight."""
        addresses = {a.url: a for a in self._routing.routable(self._version)}
        now = asyncio.get_running_loop().time()
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            others = addresses.keys() - {request.last_url} or addresses.keys()
            loads = {url: self._loads[url] for url in addresses if url in others}
            url = None
            if now >= request.not_before:
                url = choose(request.key, loads, request.num_prompts, self._concurrency)
            if url is None:
                self._waiting.append(request)  # all keep their order: each is looked at once
                continue
            task = asyncio.create_task(exchange.generate(addresses[url], request, self._sampling))
            self._running[task] = request, addresses[url]
            self._loads[url] += request.num_prompts

    def _needs_refit(self) -> bool:
        """Nothing is in flight: whether waiting cannot help."""
        if not self._waiting or self._routing.routable(self._version):
            return False
        return self._routing.outlook(self._version) is Outlook.REFIT

    async def _wait(self, changed: asyncio.Event) -> None:
        """Until an answer comes, a server's state changes or a pause is over."""
        now = asyncio.get_running_loop().time()
        pauses = [r.not_before - now for r in self._waiting if r.not_before > now]
        change = asyncio.create_task(changed.wait())
        try:
            await asyncio.wait(
                {change, *self._running},
                timeout=min([LOOK_EVERY, *pauses]),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            change.cancel()

    def _move_lost(self) -> None:
        """What is in flight at a server that was given up is asked elsewhere."""
        for task, (_, address) in list(self._running.items()):
            if not task.done() and self._routing.lost(address.url, self._version):
                task.cancel()
                self._again(self._take(task), address, "its server was lost")

    def _collect(self) -> None:
        for task in [task for task in self._running if task.done()]:
            address = self._running[task][1]
            request = self._take(task)
            try:
                answers = task.result()
            except Failed as error:
                self._routing.unanswered(address.url, str(error))
                self._again(request, address, str(error))
                continue
            if others := self._other_versions(answers, request):
                reason = (
                    f"{address.url} answers with weight versions {others} instead of "
                    f"{self._version}; it was restarted or changed behind the trainer's back"
                )
                self._routing.wrong_version(address.url, reason)
                self._again(request, address, reason)
                continue
            self._routing.answered(address.url)
            for place, responses in zip(request.places, answers, strict=True):
                self._groups[place] = responses if _has_tokens(responses) else []
                self._tokens += sum(len(response.token_ids) for response in responses)
            self._go_on(request, address)

    def _go_on(self, request: Request, address: Address) -> None:
        """What somebody else aborted is asked for again, from where it is."""
        for place, prompt in zip(request.places, request.prompts, strict=True):
            if not is_complete(self._groups[place]):
                rest = Request([place], [prompt], self._n, tuple(self._groups[place]))
                self._again(rest, address, "it was aborted")

    def _take(self, task: Answer) -> Request:
        request, address = self._running.pop(task)
        self._loads[address.url] -= request.num_prompts
        return request

    def _again(self, request: Request, address: Address, problem: str) -> None:
        if self._aborting:
            return  # enough is answered; the next rollout asks for this
        self._attempts.update(request.places)
        attempts = max(self._attempts[place] for place in request.places)
        if attempts >= ATTEMPTS:
            raise RolloutServerError(
                f"{address.url}/generate did not answer the request of {request.source} in "
                f"{ATTEMPTS} attempts; the last problem: {problem}"
            )
        now = asyncio.get_running_loop().time()
        request.not_before = now + self._limits.pause(attempts)
        request.last_url = address.url
        self._waiting.append(request)

    def _other_versions(self, answers: list[list[Response]], request: Request) -> list[str]:
        """The versions but the wanted one that new tokens come from."""
        if self._version is None:
            return []
        starts = [len(response.token_ids) for response in request.begun] or [0] * self._n
        found = {
            span.version
            for responses in answers
            for response, start in zip(responses, starts, strict=True)
            for span in response.spans
            if span.end > start
        }
        return sorted(found - {self._version})

    async def _abort(self, exchange: Exchange) -> None:
        """What still runs ends with the tokens that it has."""
        self._aborting = True
        deadline = time.monotonic() + ABORT_PATIENCE
        while self._running and time.monotonic() < deadline:
            # Again and again: what a server has not begun yet does not hear it.
            addresses = {address.url: address for _, address in self._running.values()}
            await asyncio.gather(*map(exchange.abort_all, addresses.values()))
            await asyncio.wait(self._running, timeout=LOOK_EVERY)
            self._collect()

    def _line(self) -> str:
        seconds = time.monotonic() - self._started
        return (
            f"rollout  {self._num_complete}/{self._wanted} prompts, "
            f"{sum(self._loads.values())} in flight, {len(self._loads)} servers, "
            f"{self._tokens / seconds:,.0f} tok/s"
        )


def _has_tokens(responses: Sequence[Response]) -> bool:
    return any(response.token_ids for response in responses)
