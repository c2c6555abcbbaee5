"""Replies in the form of OpenAI's chat completions."""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megavlm.environments.base import ChatFormat
from megavlm.environments.tools.calls import MalformedCall, ToolCall, read_reply
from megavlm.environments.tools.tool import read_arguments
from megavlm.rollout.gateway.messages import ChatMessage, ChatPart


@dataclass(frozen=True)
class ChatReply:
    """A response as the agent sees it. finish: stop, length or tool_calls. num_malformed: Tool
    calls that cannot be read; all calls are then left in the text.
    """

    message: ChatMessage
    finish: str
    num_malformed: int = 0

    def values(self) -> dict[str, Any]:
        """Return the message as JSON values."""
        text = "".join(part.text for part in self.message.parts)
        values: dict[str, Any] = {"role": "assistant", "content": text}
        if self.message.thought:
            values["reasoning_content"] = self.message.thought
        if self.message.calls:
            values["content"] = text or None
            values["tool_calls"] = [_call(*call) for call in self.message.calls]
        return values


def make_reply(
    text: str, finish: str, chat: ChatFormat, tools: Sequence[Mapping[str, Any]]
) -> ChatReply:
    """Return a response's text as a reply. tools: Tools of the request; without any, nothing in the
    text is a call.
    """
    read = read_reply(text, chat)
    calls = [call for call in read.calls if isinstance(call, ToolCall)] if tools else []
    malformed = [call for call in read.calls if isinstance(call, MalformedCall)] if tools else []
    shown = read.text
    if malformed or not tools:
        calls = []
        shown = "" if read.thought and not read.text else text.rpartition("</think>")[2].strip()
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}
    message = ChatMessage(
        "assistant",
        (ChatPart(shown),) if shown else (),
        tuple((call.name, _arguments(call, schemas)) for call in calls),
        read.thought,
    )
    return ChatReply(
        message, "tool_calls" if calls and finish == "stop" else finish, len(malformed)
    )


def _arguments(call: ToolCall, schemas: Mapping[str, Any]) -> dict[str, Any]:
    parameters = schemas.get(call.name, {}).get("parameters") or {}
    return read_arguments(call.arguments, parameters)


def _call(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


@dataclass(frozen=True)
class Completion:
    """The replies to a request."""

    replies: Sequence[ChatReply]
    num_prompt_tokens: int
    num_new_tokens: int

    def whole(self) -> dict[str, Any]:
        choices = [
            {"index": i, "message": reply.values(), "finish_reason": reply.finish, "logprobs": None}
            for i, reply in enumerate(self.replies)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage}

    def chunks(self, *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the completion as chunks of a stream."""
        head = self._head("chat.completion.chunk")
        for index, reply in enumerate(self.replies):
            values = reply.values()
            for place, call in enumerate(values.get("tool_calls", ())):
                call["index"] = place
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
