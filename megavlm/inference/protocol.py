"""What requests to SGLang and its answers have in common: how tokens are sampled, and responses.
Bodies of requests are made in bodies.py, and answers read in answers.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt

from megavlm.inference.routed_experts import RoutedExpertsShape

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

ABORT = "abort"
ADAPTER_PREFIX = "megavlm-"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. Temperature 0 is greedy; top_k 0 keeps all tokens.

    suppressed_ids: Tokens that are never sampled; log-probs refer to the distribution without them.
    stop_ids: Tokens at which servers end a response, from the model folder. adapter: Name of the
    LoRA adapter to use; None uses only the base weights. vocab_size: Vocabulary size of the model;
    a response with a larger token id is malformed. cache_key: Servers reuse prefixes only among
    requests with the same key; None shares them with all requests without a key. routed_experts:
    Sizes of the routed experts that servers return with the tokens; None asks for none.
    returns_kept: If true, servers return the tokens that top_p and top_k keep, and log-probs of the
    softmax over these tokens.
    """

    temperature: float
    max_new_tokens: int
    suppressed_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    adapter: str | None = None
    vocab_size: int = 2**31
    cache_key: str | None = None
    routed_experts: RoutedExpertsShape | None = None
    top_p: float = 1.0
    top_k: int = 0
    returns_kept: bool = False


def adapter_name(version: int | str) -> str:
    """Return the adapter name that requests use for a weight version."""
    return f"{ADAPTER_PREFIX}{version}"


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a response, sampled with weight version `version`."""

    version: str
    start: int
    end: int


class KeptTokens(NamedTuple):
    """The tokens that top-p and top-k kept at each of T tokens, including that token. A token
    without any was sampled from the whole vocabulary.
    """

    sizes: npt.NDArray[np.int32]  # [T]
    ids: npt.NDArray[np.int32]  # [K], token by token


class TopTokens(NamedTuple):
    """A teacher's k likeliest tokens at each of T tokens, with their log-probs in nats."""

    ids: npt.NDArray[np.int32]  # [T, k]
    logprobs: npt.NDArray[np.float32]  # [T, k]


class TeacherLogprobs(NamedTuple):
    """A teacher's log-probs of a response of T tokens, at temperature 1, and its likeliest tokens
    if it was asked for them.
    """

    logprobs: npt.NDArray[np.float32]  # [T]
    top: TopTokens | None = None


@dataclass(frozen=True, eq=False)
class Response:
    """One sampled response of T tokens, including its end-of-turn token if it has one.

    logprobs: Natural log-prob of each token at the sampling temperature (1 if greedy), under the
    weights that sampled it and among the tokens in `kept`. finish: "stop", "length", or "abort" if
    the response can be continued. weight_version: Version of the weights that finished it. spans:
    Weight versions of all tokens, in order. routed_experts: Experts of the R tokens before the last
    one, which begin in the prompt, as they were when the tokens after them were sampled. None if
    the server returned none. teacher_logprobs: Log-prob of each token by a teacher, at temperature
    1; None if it gave none. drafts: Drafts that the server accepted, and the passes in which it
    verified some; (0, 0) without speculative decoding. kept: The tokens that top-p and top-k kept;
    None for the whole vocabulary. teacher_top: The teacher's likeliest tokens; None if it was not
    asked for them, or gave none.

    Example, "I<|im_end|>", of which weights 5 sampled the first token and weights 6 the rest:
        token_ids:      [40, 151645]
        logprobs:       [-0.5, -0.25]
        finish:         "stop"
        weight_version: "6"
        spans:          [["5", 0, 1], ["6", 1, 2]]
    """

    token_ids: npt.NDArray[np.int32]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T]
    finish: str
    weight_version: str
    spans: tuple[VersionSpan, ...] = ()
    routed_experts: npt.NDArray[Any] | None = None  # [R, layers, top-k] uint8 or int16
    teacher_logprobs: npt.NDArray[np.float32] | None = None  # [T]
    drafts: tuple[int, int] = (0, 0)
    kept: KeptTokens | None = None
    teacher_top: TopTokens | None = None

    def with_scores(self, found: TeacherLogprobs) -> "Response":
        """Return the response with a teacher's log-probs."""
        return replace(self, teacher_logprobs=found.logprobs, teacher_top=found.top)

    @property
    def is_complete(self) -> bool:
        return self.finish != ABORT

    def then(self, rest: "Response") -> "Response":
        """Return the response joined with its continuation."""
        offset = len(self.token_ids)
        spans = list(self.spans)
        for span in rest.spans:
            start, end = span.start + offset, span.end + offset
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(span.version, spans[-1].start, end)
            else:
                spans.append(VersionSpan(span.version, start, end))
        return Response(
            np.concatenate([self.token_ids, rest.token_ids]),
            np.concatenate([self.logprobs, rest.logprobs]),
            rest.finish,
            rest.weight_version,
            tuple(spans),
            self._routes_then(rest),
            drafts=(self.drafts[0] + rest.drafts[0], self.drafts[1] + rest.drafts[1]),
            kept=self._kept_then(rest),
        )

    def _kept_then(self, rest: "Response") -> KeptTokens | None:
        """Return the kept tokens followed by a continuation's."""
        if self.kept is None and rest.kept is None:
            return None
        whole = np.zeros(len(self.token_ids), np.int32), np.zeros(len(rest.token_ids), np.int32)
        none = np.zeros(0, np.int32)
        first, then = self.kept or (whole[0], none), rest.kept or (whole[1], none)
        return KeptTokens(*map(np.concatenate, zip(first, then, strict=True)))

    def _routes_then(self, rest: "Response") -> Array | None:
        """Return the routed experts joined with those of a continuation. Where some between the two
        are missing, only the continuation's are kept.
        """
        if not len(rest.token_ids):
            return self.routed_experts
        if self.routed_experts is None or rest.routed_experts is None:
            return rest.routed_experts
        return np.concatenate([self.routed_experts, rest.routed_experts])

    def first_unrouted(self, num_prompt_tokens: int) -> int:
        """Return the number of tokens, the prompt's included, before those whose routed experts are
        not known yet.
        """
        if self.routed_experts is None:
            return 0
        return num_prompt_tokens + max(len(self.token_ids) - 1, 0)


class Scored(NamedTuple):
    """Responses to one prompt that a server scores as a teacher, and how many of its likeliest
    tokens it returns at each position.
    """

    responses: Sequence[Response]
    top_k: int


def is_complete(responses: Sequence[Response]) -> bool:
    """Return True if a group has all its responses and none is aborted."""
    return bool(responses) and all(response.is_complete for response in responses)


def first_unrouted(prompt: "Prompt", begun: Sequence[Response]) -> int:
    """Return the first token that has no routed experts yet in one of the responses."""
    return min(response.first_unrouted(len(prompt.token_ids)) for response in begun)


def bearer(key: str | None) -> dict[str, str]:
    """Return the Authorization header for `key`; empty without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def json_object(reply: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in a reply. Raises ValueError if the reply is anything else."""
    answer = reply.json()
    if not isinstance(answer, dict):
        raise ValueError(f"{str(answer)[:100]!r} is not a JSON object")
    return answer
