"""The calls of an agent in one episode, joined by their messages.

A call whose messages extend an earlier call and its reply continues the tokens of that call: only
the new messages are tokenized. Any other call is rendered as a whole and begins a branch.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megavlm.data.processor import Processor, Prompt, PromptTooLong
from megavlm.data.rows import Row
from megavlm.environments.base import ChatFormat
from megavlm.inference.protocol import Response
from megavlm.inference.requests import RequestRefused, RequestTimedOut
from megavlm.rollout.gateway.errors import BadRequest, SessionEnded
from megavlm.rollout.gateway.messages import ChatMessage, as_row
from megavlm.rollout.gateway.parameters import ChatRequest
from megavlm.rollout.gateway.replies import ChatReply, Completion, make_reply
from megavlm.rollout.group_tree import CallTree

# Returns one response, with a limit of its tokens, to a prompt.
AskAtMost = Callable[[Prompt, int], Awaitable[Response]]


@dataclass(frozen=True)
class SessionLimits:
    """Limits of an episode.

    max_new_tokens: Tokens of a response.
    max_calls: Responses.
    max_tokens: Tokens of all calls, where tokens that calls share count once.
    max_images: Images of a prompt; None sets no limit.
    """

    max_new_tokens: int
    max_calls: int
    max_tokens: int
    max_images: int | None = None


@dataclass(eq=False)
class Call:
    """A prompt with a response. is_sent: True once the agent has the reply."""

    request: ChatRequest
    prompt: Prompt
    response: Response
    text: str
    reply: ChatReply
    is_sent: bool = False
    is_extended: bool = False

    @property
    def messages(self) -> list[ChatMessage]:
        """The messages with the reply."""
        return [*self.request.messages, self.reply.message]


class GatewaySession:
    """The session of an episode.

    ended: Future of the reward that the agent posts. It raises RequestTimedOut if a request for a
    response was given up.
    """

    def __init__(
        self,
        key: str,
        row: Row,
        processor: Processor,
        chat: ChatFormat,
        limits: SessionLimits,
        ask: AskAtMost,
        note: Callable[[Response, Sequence[str]], None],
    ) -> None:
        """row: The episode's row. ask: Asks the rollout servers. note: Called when the agent has a
        reply, with the response and the texts of all calls.
        """
        self.key, self._row = key, row
        self._processor, self._chat, self._limits = processor, chat, limits
        self._ask, self._note = ask, note
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.counts: Counter[str] = Counter()
        self._calls: list[Call] = []
        self._rendered: list[tuple[list[ChatMessage], list[Any], Prompt]] = []
        self._tree = CallTree()
        self._sampling: set[asyncio.Future[list[Response]]] = set()
        self._num_open = self._reserved = 0  # responses that are sampled now, and their tokens
        self._is_closed = False

    @property
    def calls(self) -> list[Call]:
        """The calls whose replies the agent has, to be trained on."""
        return [call for call in self._calls if call.is_sent]

    async def answer(
        self, request: ChatRequest, *, is_retry: bool
    ) -> tuple[Completion, list[Call]]:
        """Sample the responses to a request. Returns the completion, and the calls that are to be
        given to `sent` once the agent has it.

        is_retry: True if the client says that it repeats a request. Raises BadRequest,
        SessionEnded, and RequestTimedOut.
        """
        self._check_open()
        if is_retry:
            self._forget(request)
        prompt = self._prompt(request)
        most = self._most_tokens(request, prompt)
        self._num_open += request.n
        self._reserved += request.n * most
        sampling = asyncio.gather(*(self._ask(prompt, most) for _ in range(request.n)))
        self._sampling.add(sampling)
        try:
            responses = await sampling
        except asyncio.CancelledError:
            self._check_open()  # it was closed
            self.counts["cancelled_calls"] += 1
            raise
        except RequestRefused as error:
            raise BadRequest(f"the rollout server refused the request ({error})") from error
        except RequestTimedOut as error:
            if not self.ended.done():
                self.ended.set_exception(error)
            raise
        finally:
            self._sampling.discard(sampling)
            self._num_open -= request.n
            self._reserved -= request.n * most
        self._check_open()
        calls = [self._made(request, prompt, response) for response in responses]
        self._calls += calls
        completion = Completion(
            [call.reply for call in calls],
            len(prompt.token_ids),
            sum(len(response.token_ids) for response in responses),
        )
        return completion, calls

    def sent(self, calls: Sequence[Call]) -> None:
        """Note that the agent has the replies of calls."""
        for call in calls:
            call.is_sent = not (self.ended.done() or self._is_closed)
            self._note(call.response, [call.text for call in self.calls])

    def cancelled(self, calls: Sequence[Call]) -> None:
        """Note that the agent was gone before it had the replies of calls."""
        self._calls = [call for call in self._calls if call not in calls]
        self.counts["cancelled_calls"] += len(calls)

    def end(self, reward: Any) -> None:
        """End the session with a reward that the agent posts. Raises SessionEnded if it has
        ended.
        """
        self._check_open()
        self.ended.set_result(reward)

    def close(self) -> None:
        """Give up the responses that are still sampled."""
        self._is_closed = True
        for sampling in self._sampling:
            sampling.cancel()

    def _check_open(self) -> None:
        if self.ended.done() or self._is_closed:
            raise SessionEnded("the episode of this key has ended")

    def _forget(self, request: ChatRequest) -> None:
        """Forget the call that a client repeats although its reply was sent."""
        for call in reversed(self._calls):
            if call.request == request and not call.is_extended:
                self.cancelled([c for c in self._calls if c.request is call.request])
                return

    def _made(self, request: ChatRequest, prompt: Prompt, response: Response) -> Call:
        text = self._processor.decode(response.token_ids.tolist())
        reply = make_reply(text, response.finish, self._chat, request.tools)
        self.counts["malformed_calls"] += reply.num_malformed
        self._tree.add(0, prompt, response)
        return Call(request, prompt, response, text, reply)

    def _prompt(self, request: ChatRequest) -> Prompt:
        """Return the prompt of a request. Raises BadRequest if the messages cannot be rendered."""
        messages = request.messages
        if messages[-1].role == "assistant":
            raise BadRequest(
                "the last message is the assistant's: the gateway begins a new message and cannot "
                "continue one"
            )
        for known_messages, tools, prompt in self._rendered:  # another sample, or a retry
            if known_messages == messages and tools == request.tools:
                return prompt
        known = max(
            (call for call in self._calls if self._extends(request, call)),
            key=lambda call: len(call.messages),
            default=None,
        )
        further = messages[len(known.messages) :] if known else messages
        tools = [] if known else request.tools
        row = as_row(self._row, further, tools, self._processor.chat_template.spelled_out)
        try:
            if known is None:
                prompt = self._processor.prompt(row)
            else:
                known.is_extended = True
                prompt = self._processor.next_turn(known.prompt, self._closed(known), row)
        except PromptTooLong as error:
            raise BadRequest(str(error), "context_length_exceeded") from error
        except ValueError as error:
            raise BadRequest(str(error)) from error
        self.counts["branches"] += known is None and bool(self._rendered)
        self._rendered.append((messages, request.tools, prompt))
        self.counts["unmatched_messages"] += sum(m.role == "assistant" for m in further)
        return prompt

    def _extends(self, request: ChatRequest, call: Call) -> bool:
        """Return True if the messages of a request begin with those of a call and its reply, and
        the call's tokens can be continued.
        """
        known = call.messages
        return (
            len(request.messages) > len(known)
            and request.tools == call.request.tools
            and not np.isin(call.response.token_ids, self._processor.vision_token_ids).any()
            and all(m.equals(k) for m, k in zip(request.messages, known, strict=False))
        )

    def _closed(self, call: Call) -> Sequence[int]:
        """Return the tokens of a response with the end of its turn, also where it was cut."""
        ids = call.response.token_ids.tolist()
        return ids if ids[-1] in self._processor.end_ids else [*ids, self._processor.eos_id]

    def _most_tokens(self, request: ChatRequest, prompt: Prompt) -> int:
        """Return the limit of a response's tokens. Raises BadRequest if none are left."""
        limits = self._limits
        if len(self._calls) + self._num_open + request.n > limits.max_calls:
            raise BadRequest(
                f"this episode may have environment.max_turns={limits.max_calls} responses, and no "
                f"more than {limits.max_calls - len(self._calls) - self._num_open} are left"
            )
        if limits.max_images is not None and len(prompt.images) > limits.max_images:
            raise BadRequest(
                f"the messages have {len(prompt.images)} images, and a prompt may have "
                f"environment.max_images={limits.max_images}"
            )
        known = self._tree.num_tokens + self._tree.num_further(0, prompt)
        left = (limits.max_tokens - known - self._reserved) // request.n
        if left < 1:
            raise BadRequest(
                f"this episode may have environment.max_tokens={limits.max_tokens} tokens, and "
                f"with this prompt of {len(prompt.token_ids)} none are left for a response",
                "context_length_exceeded",
            )
        self._tree.add_prompt(0, prompt)
        asked = request.max_completion_tokens or request.max_tokens or left
        return min(limits.max_new_tokens, asked, left)
