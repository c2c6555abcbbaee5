"""Generation of a batch: keeps requests in flight at all servers until all groups are complete."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.kept_images import SentImages
from megavlm.inference.live_sessions import LiveSessions
from megavlm.inference.protocol import Response, SamplingParams, Scored, bearer, is_complete
from megavlm.inference.requests import (
    ATTEMPTS,
    Request,
    RequestFailed,
    RequestLimits,
    RequestRefused,
    RequestTimedOut,
    make_requests,
)
from megavlm.inference.server_pool.routing import Address, Routing, choose_server

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

logger = logging.getLogger(__name__)

# Seconds until a batch without an answer shows that it waits. Before that, the activity's name
# stays: a due line of a log would otherwise often be about a batch that has just begun.
SHOW_WAIT_AFTER = 10.0
POLL_EVERY = 0.5  # seconds between checks for changes that trigger no event
ABORT_TIMEOUT = 30.0  # seconds that aborted requests have to return

ResponseTask = asyncio.Task[list[list[Response]]]


class GenerateFn(Protocol):
    """Function that returns one response to another prompt. most: Limit of its tokens, if it is
    below the sampling's. first_routed: The first token of the prompt whose routes are not known.
    session: Number of the session among those of the first prompt; its requests stay at one server.
    If the call is cancelled, its request is dropped.
    """

    def __call__(
        self, prompt: "Prompt", most: int | None = None, first_routed: int = 0, session: int = 0
    ) -> Awaitable[Response]: ...


# Called with a prompt's index and its responses as soon as these are complete, or with no responses
# if its request timed out (GenerationBatch.skip_timed_out).
OnComplete = Callable[[int, list[Response], GenerateFn], Coroutine[Any, Any, None]]


@dataclass(eq=False, kw_only=True)
class GenerationBatch:
    """Generation of n responses to each of `prompts`. With n = 0, prompts get no response:
    `on_complete` runs for each of them as soon as a server has room for its `agents`, and the
    agents ask for all of their responses.

    groups: One list of responses for each prompt, filled in place. A group is complete, partly
    aborted, or empty.

    version: Weight version that must generate the responses. With None, any version will do for
    which `accepts` returns True, and a response that a weight push aborts is continued, as often as
    needed.

    on_complete: Runs for each complete group while others are generated. The prompts that it passes
    to `ask` are appended to prompts and groups.

    skip_timed_out: A group whose request times out in all attempts is left empty if this is true:
    `on_complete` is called with [], and `ask` raises RequestTimedOut for a later turn. `ask` raises
    RequestRefused for a later turn that a server refuses, in any case.

    scored: Responses to the only prompt, n of them. They are not sampled, but returned with the
    log-probs that the servers give them as a teacher.

    show: Callback for a progress line. beat: Callback for each answer.

    loads, sent_images, sessions, peers: Slots taken per server, images that servers keep, sessions
    that are played, and all batches of the client; shared by them.

    resumed: Set unless the batch is paused.
    """

    prompts: list["Prompt"]
    groups: list[list[Response]]
    n: int
    sampling_params: SamplingParams
    routing: Routing
    http: aiohttp.ClientSession
    limits: RequestLimits
    show: Callable[[str], object]
    beat: Callable[[], object]
    version: str | None = None
    agents: int = 0
    on_complete: OnComplete | None = None
    skip_timed_out: bool = False
    scored: Scored | None = None
    accepts: Callable[[str], bool] | None = None
    loads: Counter[str] = field(default_factory=Counter)
    sent_images: SentImages = field(default_factory=SentImages)
    sessions: LiveSessions = field(default_factory=lambda: LiveSessions(None))
    peers: "list[GenerationBatch]" = field(default_factory=list)
    resumed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _num_first: int = field(init=False)  # prompts of first turns; later turns follow
    _followed: set[int] = field(init=False, default_factory=set)  # places
    _timed_out: set[int] = field(init=False, default_factory=set)  # places
    _followers: dict[int, asyncio.Task[None]] = field(init=False, default_factory=dict)
    _asked: dict[int, asyncio.Future[Response]] = field(init=False, default_factory=dict)
    # Limit of tokens, first token with routes, and session, by index
    _further: dict[int, tuple[int | None, int, tuple[int, int]]] = field(
        init=False, default_factory=dict
    )
    # Server that answered last, by index of a first prompt and by session
    _homes: dict[int | tuple[int, int], str] = field(init=False, default_factory=dict)
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _waiting: deque[Request] = field(init=False, default_factory=deque)
    _running: dict[ResponseTask, tuple[Request, Address]] = field(init=False, default_factory=dict)
    _ended: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _attempts: Counter[int] = field(init=False, default_factory=Counter)  # failed attempts by index
    _num_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._num_first = len(self.prompts)
        self.resumed.set()
        self._ended.set()

    async def run(self) -> bool:
        """Return True once all groups are complete and followed, False after a pause or if only a
        refit can help. It can run again then; it keeps the responses that it has.
        """
        self._num_tokens, started = 0, time.monotonic()
        self._ended.clear()
        loop = asyncio.get_running_loop()
        with self.routing.in_use(partial(loop.call_soon_threadsafe, self._wake)):
            try:
                self._waiting = deque(self._make_requests())
                self._follow_complete()
                while (
                    self._num_complete + len(self._timed_out) < self._num_first or self._followers
                ):
                    self._changed.clear()
                    self._move_lost()
                    if self.resumed.is_set():
                        self._send_waiting()
                    if not self._running and (not self.resumed.is_set() or self._needs_refit()):
                        return False
                    await self._wait()
                    self._collect()
                    seconds = time.monotonic() - started
                    if self._num_tokens or seconds > SHOW_WAIT_AFTER:
                        self.show(self._line(seconds))
                return True
            finally:
                ended = list(self._running)
                for task in ended:
                    task.cancel()
                    self._take(task)
                await asyncio.gather(*ended, return_exceptions=True)
                self._ended.set()

    async def close(self) -> None:
        """Cancel the followers that still run after an error."""
        for task in self._followers.values():
            task.cancel()
        await asyncio.gather(*self._followers.values(), return_exceptions=True)

    def _wake(self) -> None:
        self._changed.set()

    def _make_requests(self) -> list[Request]:
        first, requests = self._num_first, []
        if self.n:
            requests = make_requests(
                self.prompts[:first],
                self.n,
                self.sampling_params,
                self.groups[:first],
                self.limits,
                num_servers=max(len(self.routing.routable(self.version)), 1),
                skipped=self._timed_out,
            )
        for request in requests if self.scored else ():
            request.scored = self.scored
        return [*requests, *map(self._next_turn, self._asked)]

    def _next_turn(self, index: int) -> Request:
        prompt, begun = self.prompts[index], tuple(self.groups[index])
        slots = self.limits.slots(prompt)
        most, first_routed, session = self._further[index]
        return Request([index], [prompt], 1, begun, slots, most, first_routed, session)

    async def _ask(
        self,
        first: int,
        prompt: "Prompt",
        most: int | None = None,
        first_routed: int = 0,
        session: int = 0,
    ) -> Response:
        """Return one response to the prompt of a later turn. first: Index of the first prompt."""
        index = len(self.prompts)
        self._further[index] = most, first_routed, (first, session)
        self.prompts.append(prompt)
        self.groups.append([])
        answer = self._asked[index] = asyncio.get_running_loop().create_future()
        self._waiting.append(self._next_turn(index))
        self._wake()
        try:
            response = await answer
            known = len(self.prompts[first].token_ids)
            self.sessions.grow(len(prompt.token_ids) + len(response.token_ids) - known)
            return response
        except asyncio.CancelledError:
            self._asked.pop(index, None)
            self._wake()
            raise

    def _settle(self, index: int, result: Response | Exception) -> None:
        """Give `ask` its result, unless it is just being cancelled."""
        answer = self._asked.pop(index)
        if answer.cancelled():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def _is_needed(self, request: Request) -> bool:
        """Return False for a later turn whose follower no longer waits for it."""
        (index, *_) = request.indices
        return index < self._num_first or index in self._asked

    def _is_complete(self, group: Sequence[Response]) -> bool:
        return self.n == 0 or is_complete(group)

    def _follow_complete(self) -> None:
        """Start `on_complete` for groups that have become complete, in the order of their
        prompts.
        """
        if self.on_complete is None:
            return
        for index, group in enumerate(self.groups[: self._num_first]):
            if index not in self._followed and self._is_complete(group) and self._admits(index):
                self._followed.add(index)
                self._start_follower(index, group)

    def _admits(self, index: int) -> bool:
        """Return True if a group may be followed. Agents start at the server with the fewest
        sessions among those that have room; other sessions have started with their request.
        """
        if self.n:
            return True
        length, addresses = len(self.prompts[index].token_ids), self.routing.routable(self.version)
        rooms = [a.url for a in addresses if self.sessions.has_room(a, [length], self.agents)]
        if rooms:
            self._homes[index] = url = min(rooms, key=self.sessions.number)
            self.sessions.start((self, index), url, length, self.agents)
        return bool(rooms) or not addresses  # what agents ask for waits for a server

    def _start_follower(self, index: int, responses: list[Response]) -> None:
        assert self.on_complete is not None
        ask = partial(self._ask, index)
        follower = asyncio.create_task(self.on_complete(index, responses, ask))
        self._followers[index] = follower
        if not self.n:
            follower.add_done_callback(lambda _: self._end_sessions(index))
        elif responses and self.scored is None:
            self.sessions.grow(max(len(response.token_ids) for response in responses))
            if home := self._homes.get(index):  # none where an earlier run has the first responses
                length = len(self.prompts[index].token_ids)
                self.sessions.start((self, index), home, length, self.n)
            follower.add_done_callback(lambda _: self._end_sessions(index))
        follower.add_done_callback(lambda _: self._wake())

    def _end_sessions(self, index: int) -> None:
        """Make room for other sessions, of all batches."""
        self.sessions.end((self, index))
        for peer in self.peers:
            peer._wake()

    @property
    def _num_complete(self) -> int:
        if not self.n:
            return len(self._followed)
        return sum(map(self._is_complete, self.groups[: self._num_first]))

    def _send_waiting(self) -> None:
        """Send as many waiting requests as the servers may have in flight. No request overtakes
        another that waits for free slots at the same server. Sessions start only where the cache
        has room for them, and wait without keeping later turns from their servers.
        """
        addresses = {a.url: a for a in self.routing.routable(self.version)}
        now = asyncio.get_running_loop().time()
        full: set[str] = set()
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if not self._is_needed(request):
                continue
            others = addresses.keys() - {request.last_url} or addresses.keys()
            loads = {url: self.loads[url] for url in addresses if url in others - full}
            lengths = [len(prompt.token_ids) for prompt in request.prompts]
            if begins := request.session is None and self.scored is None and self.on_complete:
                loads = {
                    url: load
                    for url, load in loads.items()
                    if self.sessions.has_room(addresses[url], lengths, self.n)
                }
            url = None
            if now >= request.not_before:
                url = choose_server(
                    request.key, loads, request.slots, self.limits.concurrency, self._home(request)
                )
                if url is None:
                    full.update(loads)
            if url is None:
                self._waiting.append(request)  # each is tried once, so all keep their order
                continue
            response = request.send(
                self.http, addresses[url], self.sampling_params, self.limits, self.sent_images
            )
            self._running[asyncio.create_task(response)] = request, addresses[url]
            self.loads[url] += request.slots
            if begins:
                for index, length in zip(request.indices, lengths, strict=True):
                    self.sessions.start((self, index), url, length, self.n)

    def _home(self, request: Request) -> str | None:
        """Return the server that answered the last turn of a later turn's session."""
        if request.session is None:
            return None
        return self._homes.get(request.session, self._homes.get(request.session[0]))

    def _needs_refit(self) -> bool:
        """Return True if no server will become usable without a refit. No request is in flight."""
        if not self._waiting or self.routing.routable(self.version):
            return False
        return self.routing.lacks_weights()

    async def _wait(self) -> None:
        """Wait for a response, a later turn's request, a change of a server's state, or the end of
        a retry pause.
        """
        now = asyncio.get_running_loop().time()
        pauses = [r.not_before - now for r in self._waiting if r.not_before > now]
        change = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait(
                {change, *self._running},
                timeout=min([POLL_EVERY, *pauses]),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            change.cancel()

    def _move_lost(self) -> None:
        """Retry requests in flight at servers that were lost, and end those that nobody needs."""
        for task, (request, address) in list(self._running.items()):
            if not task.done() and not self._is_needed(request):
                task.cancel()
                self._take(task)
            elif not task.done() and self.routing.lost(address.url, self.version):
                task.cancel()
                self._retry(self._take(task), address, "its server was lost")

    def _collect(self) -> None:
        """Collect the responses of all requests that have ended, and retry failed requests."""
        for task in [task for task in self._running if task.done()]:
            address = self._running[task][1]
            request = self._take(task)
            try:
                answers = task.result()
            except RequestFailed as error:
                self.routing.request_failed(address.url, str(error))
                self._retry(request, address, str(error), isinstance(error, RequestTimedOut))
                continue
            except RequestRefused as error:
                if self._is_needed(request) and not self._drop_sampled(request, address, error):
                    raise
                continue
            if others := self._other_versions(answers, request):
                reason = (
                    f"{address.url} answers with weight versions {others} instead of "
                    f"{self.version or 'recent ones'}; it restarted, or another process changed "
                    "its weights"
                )
                self.routing.wrong_version(address.url, reason)
                self._retry(request, address, reason)
                continue
            self.routing.answered(address.url)
            self.beat()
            for place, responses in zip(request.indices, answers, strict=True):
                self._homes[request.session or place] = address.url
                self.groups[place][:] = responses if _has_tokens(responses) else []
                self._num_tokens += sum(len(response.token_ids) for response in responses)
                if place in self._asked and is_complete(self.groups[place]):
                    self._settle(place, responses[0])
            self._continue_aborted(request, address)
        self._follow_complete()
        for place in [place for place, task in self._followers.items() if task.done()]:
            self._followers.pop(place).result()

    def _continue_aborted(self, request: Request, address: Address) -> None:
        """Request the rest of responses that were aborted by another client or a weight push."""
        for index, prompt in zip(request.indices, request.prompts, strict=True):
            if not is_complete(self.groups[index]):
                begun = tuple(self.groups[index])
                slots = self.limits.slots(prompt)
                further = request.most, request.first_routed, request.session
                rest = Request([index], [prompt], request.n, begun, slots, *further)
                if self.accepts is None:
                    self._retry(rest, address, "it was aborted")
                else:
                    self._waiting.append(rest)

    def _take(self, task: ResponseTask) -> Request:
        request, address = self._running.pop(task)
        self.loads[address.url] -= request.slots
        if request.session is None:
            for index in request.indices:
                self.sessions.stop((self, index))
        for peer in self.peers:
            peer._wake()
        return request

    def _retry(
        self, request: Request, address: Address, problem: str, timed_out: bool = False
    ) -> None:
        if not self._is_needed(request):
            return
        self._attempts.update(request.indices)
        attempts = max(self._attempts[index] for index in request.indices)
        if attempts >= ATTEMPTS:
            reason = (
                f"{address.url}/generate did not answer the request of {request.source} in "
                f"{ATTEMPTS} attempts; the last problem: {problem}; if requests take too long, "
                "raise rollout.request_timeout, or lower rollout.concurrency, "
                "rollout.image_tokens or rollout.max_new_tokens"
            )
            if not (timed_out and self.skip_timed_out):
                raise RolloutServerError(reason)
            self._skip(request, reason)
            return
        now = asyncio.get_running_loop().time()
        request.not_before = now + self.limits.pause(attempts)
        request.last_url = address.url
        self._waiting.append(request)

    def _skip(self, request: Request, reason: str) -> None:
        """Leave the groups of a request empty, and raise RequestTimedOut in the episodes that asked
        for it.
        """
        logger.warning("left out as rollout.on_timeout says: %s", reason)
        for index in request.indices:
            self.groups[index].clear()
            if index in self._asked:
                self._settle(index, RequestTimedOut(reason))
            else:
                self._timed_out.add(index)
                self._start_follower(index, [])

    def _drop_sampled(self, request: Request, address: Address, error: RequestRefused) -> bool:
        """Handle the refusal of a request with sampled tokens: a later turn's `ask` raises it, a
        continued group starts again from its prompt. Returns False for a request without sampled
        tokens.
        """
        (index, *_) = request.indices
        if index in self._asked:
            self.groups[index].clear()
            self._settle(index, error)
        elif request.begun:
            self.groups[index].clear()
            self._retry(replace(request, begun=()), address, str(error))
        else:
            return False
        self.routing.answered(address.url)
        return True

    def _other_versions(self, answers: list[list[Response]], request: Request) -> list[str]:
        """Return the weight versions of new tokens that are not accepted."""
        if (self.version is None and self.accepts is None) or request.scored:
            return []
        accepts = self.accepts or (lambda version: version == self.version)
        starts = [len(response.token_ids) for response in request.begun] or [0] * request.n
        found = {
            span.version
            for responses in answers
            for response, start in zip(responses, starts, strict=True)
            for span in response.spans
            if span.end > start
        }
        return sorted(version for version in found if not accepts(version))

    async def pause(self) -> None:
        """End `run`, abort its requests in flight, and keep their tokens, until `resumed` is set.
        Only single-turn episodes are ever paused, so no follower waits for another turn.
        """
        self.resumed.clear()
        deadline = time.monotonic() + ABORT_TIMEOUT
        while self._running and time.monotonic() < deadline:
            # Repeat, because a server does not abort a request that it has not started.
            addresses = {address.url: address for _, address in self._running.values()}
            await asyncio.gather(*map(self._abort_server, addresses.values()))
            if self._running:
                await asyncio.wait(self._running, timeout=POLL_EVERY)
            await asyncio.sleep(0)  # `run` collects what they return
        for task in list(self._running):
            task.cancel()
            self._take(task)
        await asyncio.gather(*self._followers.values(), return_exceptions=True)
        self._wake()
        await self._ended.wait()

    async def _abort_server(self, address: Address) -> None:
        try:
            await self.http.post(
                address.url + "/abort_request",
                json={"abort_all": True},
                headers=bearer(address.admin_key),
                timeout=aiohttp.ClientTimeout(self.limits.connect),
            )
        except (aiohttp.ClientError, TimeoutError):
            pass  # the requests' own timeouts end them

    def _line(self, seconds: float) -> str:
        line = f"{self._num_complete} of {self._num_first} prompts answered"
        if not self._num_tokens:
            return f"{line}, no answer for {seconds:.0f} s"
        return f"{line}, {self._num_tokens / seconds:,.0f} tokens/s"


def _has_tokens(responses: Sequence[Response]) -> bool:
    return any(len(response.token_ids) for response in responses)
