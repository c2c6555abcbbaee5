"""Environments of verifiers' classic interface, for environment.name=verifiers.

The environment plays its own rollout, with the policy as its client. Each call of the client is a
turn: the messages that are new in it are the observation, and the response is its result.
"""

import asyncio
import base64
import json
import signal
import threading
from collections.abc import Coroutine, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import verifiers as vf
from verifiers.types import Response, ResponseMessage, ToolCall

from megavlm.environments.adapters.messages import in_parts
from megavlm.environments.base import ChatMessage, Context, Image, Observation, Step, scored
from megavlm.environments.tools.calls import MalformedCall, read_reply
from megavlm.import_path import IMPORT_PATH, import_object
from megavlm.numbers import at_least
from megavlm.rewards.base import Example, Score
from megavlm.rewards.services import data_url

T = TypeVar("T")


class Verifiers:
    """An episode of an environment of verifiers. Its rubric gives the reward of the last turn.

    The episodes of a process share the environment and one event loop.
    """

    def __init__(
        self, context: Context, id: str, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Take the environment of this process. The first instance loads it.

        id: Id for verifiers.load_environment, or a function that returns the environment, as
            package.module:name.
        arguments: Arguments of that function.
        """
        self._id, self._chat = id, context.chat
        self.env = _load(id, json.dumps(arguments or {}))
        if not 0 < self.env.max_turns <= context.max_turns:
            self.env.max_turns = context.max_turns
        self._policy = _Policy()
        self._rollout: asyncio.Task[Any] | None = None
        self._prompt: Sequence[Any] = ()  # messages of the last call
        self._tools: Mapping[str, Any] = {}

    async def check(self) -> None:
        """Raise ValueError if the environment scores whole groups."""
        if self.env.requires_group_rollouts:
            raise ValueError(
                f"environment.options.id={self._id}: its rubric scores whole groups, and an "
                "episode is scored by itself; take that function out, and name it in reward.parts"
            )

    async def reset(self, row: Example, seed: int) -> Observation:
        prompt = [{**m, "content": _their_content(m["content"])} for m in in_parts(row)]
        values = {**row.extra, "prompt": prompt, "answer": row.answer, "example_id": 0}
        return await _in_shared_loop(self._begin(values))

    async def step(self, text: str) -> Step:
        reply = read_reply(text, self._chat)
        calls = list[ToolCall]()
        for call in reply.calls if self._tools else ():
            try:
                if isinstance(call, MalformedCall):
                    raise call
                tool = self._tools.get(call.name)
                arguments = call.typed(tool.parameters if tool else {})
            except MalformedCall as error:
                shown = Observation([{"role": "tool", "content": f"error: {error}"}])
                return Step(shown, 0.0, False, {"counts": {"tool_errors": 1}})
            identifier = f"call_{len(self._prompt)}_{len(calls)}"
            calls.append(ToolCall(id=identifier, name=call.name, arguments=json.dumps(arguments)))
        message = ResponseMessage(
            content=reply.text if self._tools else reply.answer,
            reasoning_content=reply.thought or None,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return await _in_shared_loop(self._go_on(message))

    async def close(self) -> None:
        await _in_shared_loop(self._end())

    async def _begin(self, values: Mapping[str, Any]) -> Observation:
        rollout = self.env.run_rollout(values, self._policy, "policy", {})
        self._rollout = asyncio.create_task(rollout)
        if (shown := await self._next()) is None:
            raise ValueError(f"{self._id}: the episode ends before a response")
        schemas = [tool.model_dump(exclude_none=True) for tool in self._tools.values()]
        tools = [{"type": "function", "function": schema} for schema in schemas]
        return Observation(shown, tools=tools)

    async def _go_on(self, message: ResponseMessage) -> Step:
        assert self._rollout is not None
        self._policy.answer.set_result(Response(id="", created=0, model="policy", message=message))
        if (shown := await self._next()) is not None:
            return Step(Observation(shown), 0.0, False)
        found = self._rollout.result()
        if found["error"]:
            raise RuntimeError(f"{self._id}: {found['error']}")
        parts = {name: float(value) for name, value in found["metrics"].items()}
        return scored(Score(found["reward"], at_least(found["reward"], 1), parts))

    async def _next(self) -> list[ChatMessage] | None:
        """Return the new messages of the next call; None if the rollout has ended."""
        assert self._rollout is not None
        call = asyncio.create_task(self._policy.calls.get())
        await asyncio.wait([call, self._rollout], return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            return None
        before = list(self._prompt)
        self._prompt, self._tools = call.result()
        if list(self._prompt[: len(before)]) != before:
            raise ValueError(
                f"{self._id}: it changes earlier messages, and the tokens of an episode are only "
                "appended; run it as an agent with environment.name=gateway"
            )
        responses = 1 if before else 0
        return [_our_message(m) for m in self._prompt[len(before) + responses :]]

    async def _end(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait([self._rollout])


class _Policy(vf.Client):
    """The policy as a client.

    calls: Prompt and tools of each call. answer: Future of the result of the last one.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.calls: asyncio.Queue[tuple[Sequence[Any], Mapping[str, Any]]] = asyncio.Queue()

    async def get_response(
        self, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Any:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.calls.put_nowait((list(prompt), {tool.name: tool for tool in tools or ()}))
        return await self.answer

    async def _unused(self, *_: Any) -> Any:
        raise AssertionError("an environment only asks its client for responses")

    setup_client = to_native_tool = to_native_prompt = get_native_response = _unused
    raise_from_native_response = from_native_response = close = _unused


@cache
def _load(id: str, arguments: str) -> Any:
    """Load an environment. It must be loaded in the main thread, because it sets signal handlers,
    which are set back here: the trainer ends this process.
    """
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    by_id = partial(vf.load_environment, id)
    make = import_object(id) if IMPORT_PATH.fullmatch(id) else by_id
    env = make(**json.loads(arguments))
    for one, handler in handlers.items():
        signal.signal(one, handler)
    if not isinstance(env, vf.MultiTurnEnv):
        raise ValueError(
            f"environment.options.id={id} is a {type(env).__name__} and not a MultiTurnEnv: name "
            "an environment with env_response"
        )
    return env


@cache
def _shared_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def _in_shared_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run in the loop of all episodes: clients and locks of an environment belong to one loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _shared_loop()))


def _their_content(parts: Sequence[str | Image]) -> Any:
    if not any(isinstance(part, Image) for part in parts):
        return "".join(map(str, parts))
    return [
        {"type": "image_url", "image_url": {"url": data_url(part.data)}}
        if isinstance(part, Image)
        else {"type": "text", "text": part}
        for part in parts
    ]


def _our_message(message: Any) -> ChatMessage:
    content = message.content
    if not isinstance(content, str):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        content = [_our_part(part) for part in parts]
    return {"role": message.role, "content": content}


def _our_part(part: Mapping[str, Any]) -> str | Image:
    if part["type"] == "text":
        return str(part["text"])
    kind, _, data = part.get("image_url", {}).get("url", "").partition(";base64,")
    if not kind.startswith("data:"):
        raise ValueError(
            f"a message has a part of type {part['type']}, but only embedded images are read"
        )
    return Image(base64.b64decode(data))
