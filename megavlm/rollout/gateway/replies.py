"""Replies in the form of OpenAI's chat completions."""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megavlm.environments.base import ChatFormat
from megavlm.environments.tools.calls import MalformedCall, ToolCall, read_reply
from megavlm.rollout.gateway.messages import ChatMessage


@dataclass(frozen=True)
class ChatReply:
    """A response as the agent sees it.

    values: The message as JSON values. message: The same as it is read when it comes back. finish:
    stop, length or tool_calls. num_malformed: Tool calls that cannot be read; all calls are then
    left in the text.
    """

    values: Mapping[str, Any]
    message: ChatMessage
    finish: str
    num_malformed: int = 0


def make_reply(
    text: str, finish: str, chat: ChatFormat, tools: Sequence[Mapping[str, Any]]
) -> ChatReply:
    """Return a response's text as a reply. tools: Tools of the request; without any, nothing in the
    text is a call.
    """
    read = read_reply(text, chat)
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}
    calls, num_malformed = list[dict[str, Any]](), 0
    for call in read.calls if tools else ():
        try:
            calls.append(_typed(call, schemas))
        except MalformedCall:
            num_malformed += 1
    values: dict[str, Any] = {"role": "assistant", "content": read.answer}
    if read.thought:
        values["reasoning_content"] = read.thought
    if is_called := bool(calls) and not num_malformed:
        values |= {"content": read.text or None, "tool_calls": calls}
    message = ChatMessage.model_validate({**values, "reasoning_content": read.thought})
    finish = "tool_calls" if is_called and finish == "stop" else finish
    return ChatReply(values, message, finish, num_malformed)


def _typed(call: ToolCall | MalformedCall, schemas: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(call, MalformedCall):
        raise call
    arguments = call.typed(schemas.get(call.name, {}).get("parameters"))
    function = {"name": call.name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


@dataclass(frozen=True)
class Completion:
    """The replies to a request."""

    replies: Sequence[ChatReply]
    num_prompt_tokens: int
    num_new_tokens: int

    def whole(self) -> dict[str, Any]:
        choices = [
            {"index": i, "message": reply.values, "finish_reason": reply.finish, "logprobs": None}
            for i, reply in enumerate(self.replies)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage}

    def chunks(self, *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the completion as chunks of a stream."""
        head = self._head("chat.completion.chunk")
        for index, reply in enumerate(self.replies):
            values = dict(reply.values)
            if calls := values.get("tool_calls"):
                values["tool_calls"] = [{**call, "index": i} for i, call in enumerate(calls)]
            for delta, finish in ((values, None), ({}, reply.finish)):
                choice = {"index": index, "delta": delta, "finish_reason": finish}
                yield {**head, "choices": [choice]}
        if with_usage:
            yield {**head, "choices": [], "usage": self._usage}

    def _head(self, kind: str) -> dict[str, Any]:
        created = int(time.time())
        name = f"chatcmpl-{secrets.token_hex(12)}"
        return {"id": name, "object": kind, "created": created, "model": "policy"}

    @property
    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_new_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_new_tokens,
        }
