"""Parameters of a request of chat completions. The recipe decides how responses are sampled,
because log-probs must be those of the distribution that the trainer computes.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megavlm.rollout.gateway.errors import BadRequest
from megavlm.rollout.gateway.messages import ChatMessage, read_messages

logger = logging.getLogger(__name__)

_READ = {"messages", "tools", "n", "max_tokens", "max_completion_tokens", "stream"}
# Parameters that change nothing of a response.
_IGNORED = {
    "model",
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
}
_OVERRIDDEN = ("temperature", "top_p", "seed")  # most agents send them
# Parameters with the only values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
}


@dataclass(frozen=True)
class ChatRequest:
    """A checked request. max_tokens: Limit of a response in tokens; None if there is none."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...]
    n: int
    max_tokens: int | None
    stream: bool
    with_usage: bool  # in a last chunk of a stream


class ParameterReader:
    """Reads requests, and says once in the log that a parameter is not followed."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def read(self, body: Any) -> ChatRequest:
        """Raises BadRequest for a request that is not understood or asks for another
        distribution.
        """
        if not isinstance(body, Mapping):
            raise BadRequest("the body must be a JSON object")
        given = {key: value for key, value in body.items() if value is not None}
        for key, value in given.items():
            if key in _OVERRIDDEN:
                self._say(key, value)
            elif key in _NEUTRAL:
                if value not in _NEUTRAL[key] and not (key == "tool_choice" and value == "none"):
                    raise BadRequest(
                        f"{key}={value!r:.80} would change what is sampled; the recipe's rollout "
                        f"section decides this: leave {key} out"
                    )
            elif key not in _READ | _IGNORED:
                raise BadRequest(f"the gateway does not know the parameter {key!r}: leave it out")
        tools = _tools(given.get("tools", []))
        if given.get("tool_choice") == "none":
            tools = []
        options = given.get("stream_options", {})
        return ChatRequest(
            read_messages(given.get("messages")),
            tuple(tools),
            _number(given, "n") or 1,
            _number(given, "max_completion_tokens") or _number(given, "max_tokens"),
            bool(given.get("stream", False)),
            isinstance(options, Mapping) and bool(options.get("include_usage")),
        )

    def _say(self, key: str, value: Any) -> None:
        if key not in self._said:
            logger.warning(
                "an agent asks for %s=%r; the gateway samples as the rollout section of the recipe "
                "says",
                key,
                value,
            )
        self._said.add(key)


def _tools(tools: Any) -> list[Mapping[str, Any]]:
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list of objects")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not (
            isinstance(function, Mapping)
            and isinstance(function.get("name"), str)
            and isinstance(function.get("parameters"), Mapping | None)
        ):
            raise BadRequest(
                f"tools[{number}] must be an object with a `function`, which has a name and, as an "
                "object, parameters"
            )
    return tools


def _number(given: Mapping[str, Any], key: str) -> int | None:
    value = given.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise BadRequest(f"{key}={value!r:.40} must be a number of at least 1")
    return value
