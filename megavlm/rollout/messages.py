"""What is said to an SGLang server and what it answers: pure functions over JSON values.

Tokens in, tokens out: prompts go as token ids with one image token per picture, which SGLang
expands itself, and as pictures that need no further resizing.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

# Added to a suppressed token's logit: its probability is exactly 0 in every float type.
SUPPRESSED = -1e9


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Temperature 0 is greedy.

    suppressed_ids are never drawn; the log-probs are those of the distribution without them.
    adapter: the name of the one that answers, None for the weights alone.
    """

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    suppressed_ids: tuple[int, ...] = ()
    adapter: str | None = None


@dataclass(frozen=True)
class Response:
    """One sampled response, with its end-of-turn token if it has one.

    logprobs: of each token, natural log, at the sampling temperature (at 1 when greedy), before
    top-p. finish: "stop" or "length". weight_version: of the weights that finished it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    weight_version: str


def generate_body(prompts: Sequence["Prompt"], n: int, sampling: Sampling) -> dict[str, Any]:
    """The body of one /generate request for n responses to each prompt."""
    parameters: dict[str, Any] = {
        "n": n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": sampling.max_new_tokens,
    }
    if sampling.suppressed_ids:
        parameters["logit_bias"] = {str(token): SUPPRESSED for token in sampling.suppressed_ids}
    body: dict[str, Any] = {
        "input_ids": [list(prompt.request_ids) for prompt in prompts],
        "sampling_params": parameters,
        "return_logprob": True,
    }
    if any(prompt.pictures for prompt in prompts):
        body["image_data"] = [[data_uri(p.png) for p in prompt.pictures] for prompt in prompts]
    if sampling.adapter is not None:
        body["lora_path"] = sampling.adapter
    return body


def data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def parse_generate(answer: Any, prompts: Sequence["Prompt"], n: int) -> list[list[Response]]:
    """The n responses of each prompt, in the order of the request.

    Raises KeyError, TypeError or ValueError when the answer is not of the form that SGLang gives,
    and RuntimeError when the server counts other prompt tokens than we do: then its picture
    processing is not ours, and its log-probs would be of another prompt.
    """
    answers = answer if isinstance(answer, list) else [answer]
    if len(answers) != len(prompts) * n:
        raise ValueError(f"{len(answers)} responses instead of {len(prompts)} x {n}")
    responses = []
    for index, prompt in enumerate(prompts):
        group = answers[index * n : (index + 1) * n]
        for item in group:
            counted, expected = item["meta_info"]["prompt_tokens"], len(prompt.token_ids)
            if counted != expected:
                raise RuntimeError(
                    f"{prompt.row.source}: the rollout server counts {counted} prompt tokens and "
                    f"the trainer {expected}; both must use the same model folder and picture sizes"
                )
        responses.append([_response(item["meta_info"]) for item in group])
    return responses


def _response(meta: Mapping[str, Any]) -> Response:
    finish = meta["finish_reason"]["type"]
    if finish not in ("stop", "length"):
        raise ValueError(f"a response ended with {meta['finish_reason']}")
    return Response(
        token_ids=tuple(int(token) for _, token, *_ in meta["output_token_logprobs"]),
        logprobs=tuple(float(logprob) for logprob, *_ in meta["output_token_logprobs"]),
        finish=finish,
        weight_version=str(meta["weight_version"]),
    )
