"""Parameters of a request of chat completions. The recipe decides how responses are sampled,
because log-probs must be those of the distribution that the trainer computes.
"""

import logging
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveInt, ValidationError

from megavlm.rollout.gateway.errors import BadRequest
from megavlm.rollout.gateway.messages import ChatMessage, ChatTool, Form

logger = logging.getLogger(__name__)

_OVERRIDDEN = ("temperature", "top_p", "seed")  # most agents send them


def _only(*neutral: Any) -> AfterValidator:
    """neutral: The only values of a parameter that change nothing."""

    def check(value: Any) -> Any:
        if value not in neutral:
            raise ValueError("would change what is sampled; rollout keys decide this: leave it out")
        return value

    return AfterValidator(check)


class ChatRequest(Form):
    """A request of chat completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    # Tools are checked as `functions`, and rendered as they were given.
    functions: list[ChatTool] = Field([], alias="tools")
    schemas: list[dict[str, Any]] = Field([], alias="tools")
    n: PositiveInt = 1
    max_tokens: PositiveInt | None = None  # of a response
    max_completion_tokens: PositiveInt | None = None
    stream: bool = Field(False, strict=False)
    stream_options: dict[str, Any] = Field({})
    # Overridden by the recipe.
    temperature: Any = None
    top_p: Any = None
    seed: Any = None
    # These change nothing of a response.
    metadata: Any = None
    model: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None
    # These would.
    frequency_penalty: Annotated[Any, _only(0)] = None
    logit_bias: Annotated[Any, _only({})] = None
    logprobs: Annotated[Any, _only(False)] = None
    modalities: Annotated[Any, _only(["text"])] = None
    parallel_tool_calls: Annotated[Any, _only(True)] = None
    presence_penalty: Annotated[Any, _only(0)] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    stop: Annotated[Any, _only([], "")] = None
    tool_choice: Annotated[Any, _only("auto", "none")] = None
    top_logprobs: Annotated[Any, _only(0)] = None

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.schemas


class ParameterReader:
    """Reads requests, and says once in the log that a parameter is not followed."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def read(self, body: Any) -> ChatRequest:
        """Raises BadRequest for a request that is not understood or asks for another
        distribution.
        """
        try:
            request = ChatRequest.model_validate(body)
        except ValidationError as error:
            raise BadRequest.of(error) from error
        for key in _OVERRIDDEN:
            if (value := getattr(request, key)) is not None and key not in self._said:
                self._said.add(key)
                logger.warning(
                    "an agent asks for %s=%r; the gateway samples as the rollout section of the "
                    "recipe says",
                    key,
                    value,
                )
        return request
