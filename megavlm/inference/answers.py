"""SGLang's answers: pure functions that return the responses in them."""

import base64
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megavlm.inference.errors import RolloutRequestError
from megavlm.inference.protocol import (
    ABORT,
    KeptTokens,
    Response,
    SamplingParams,
    TeacherLogprobs,
    TopTokens,
    VersionSpan,
    first_unrouted,
)
from megavlm.numbers import LARGEST

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

# Exceptions of parsing an answer of another form. OverflowError: JSON's 1e999 is read as infinity,
# and int() of it overflows.
MALFORMED = (KeyError, TypeError, ValueError, OverflowError)


def parse_generate(
    answer: Any,
    prompts: Sequence["Prompt"],
    n: int,
    sampling_params: SamplingParams,
    first_routed: int = 0,
) -> list[list[Response]]:
    """Return the n responses of each prompt, in the order of the request. Of a prompt's routed
    experts, the first response has all, and the others have only its last token's.

    Raises one of MALFORMED if the answer does not have SGLang's form, and RolloutRequestError if
    the server counts a different number of prompt tokens than the trainer. Their image processing
    differs then, and the log-probs would belong to another prompt.
    """
    items = _items(answer, len(prompts) * n)
    return [
        [
            _response(
                item["meta_info"],
                prompt,
                0,
                sampling_params,
                (first_routed, len(prompt.token_ids) - 1 if number else first_routed),
            )
            for number, item in enumerate(items[index * n : (index + 1) * n])
        ]
        for index, prompt in enumerate(prompts)
    ]


def parse_continue(
    answer: Any, prompt: "Prompt", begun: Sequence[Response], sampling_params: SamplingParams
) -> list[Response]:
    """Return the responses of `begun`, joined with their continuations. Raises as `parse_generate`
    does.
    """
    items, first = _items(answer, len(begun)), first_unrouted(prompt, begun)
    return [
        response.then(
            _response(
                item["meta_info"],
                prompt,
                len(response.token_ids),
                sampling_params,
                (first, response.first_unrouted(len(prompt.token_ids))),
            )
        )
        for item, response in zip(items, begun, strict=True)
    ]


def _items(answer: Any, count: int) -> list[Any]:
    items = answer if isinstance(answer, list) else [answer]
    if len(items) != count:
        raise ValueError(f"{len(items)} responses instead of {count}")
    return items


def _response(
    meta: Mapping[str, Any],
    prompt: "Prompt",
    num_before: int,
    sampling_params: SamplingParams,
    routed: tuple[int, int],
) -> Response:
    """Return a response, or its continuation after num_before tokens. routed: The first token whose
    routed experts are in the answer, and the first whose routed experts are kept.
    """
    tokens, logprobs = _arrays(meta["output_token_logprobs"])
    kept = None
    if sampling_params.returns_kept and len(tokens):
        kept, logprobs = _kept(meta, tokens, sampling_params.vocab_size)
    finish = _finish(meta["finish_reason"], tokens, num_before, sampling_params)
    if not len(tokens) and finish != ABORT:
        raise ValueError(f"a response without a token ended with {finish}")
    if finish != ABORT:  # the counts of an aborted response may lag
        counted = meta.get("completion_tokens", len(tokens))
        if counted != len(tokens) or num_before + len(tokens) > sampling_params.max_new_tokens:
            raise ValueError(
                f"a response of {counted} tokens has {len(tokens)} log-probs, but may have "
                f"{sampling_params.max_new_tokens - num_before}"
            )
    if not (np.abs(logprobs) <= LARGEST).all():  # NaN is not either
        raise ValueError("a response has log-probs that are not finite")
    if not ((tokens >= 0) & (tokens < sampling_params.vocab_size)).all():
        raise ValueError(
            f"a response has a token beyond the {sampling_params.vocab_size} of the model"
        )
    if len(tokens):  # a response that was aborted in the queue has no counts yet
        counted, expected = meta["prompt_tokens"], len(prompt.token_ids) + num_before
        if counted != expected:
            raise RolloutRequestError(
                f"{prompt.row.source}: the rollout server counts {counted} prompt tokens and "
                f"the trainer {expected}; both must use the same model folder and image sizes"
            )
    version = str(meta["weight_version"])
    spans = meta.get("weight_versions") or [{"version": version, "start": 0, "end": len(tokens)}]
    return Response(
        token_ids=tokens.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        finish=finish,
        weight_version=version,
        spans=tuple(
            VersionSpan(str(span["version"]), int(span["start"]), int(span["end"]))
            for span in spans
            if span["end"] > span["start"]
        ),
        routed_experts=_routed_experts(
            meta, len(prompt.token_ids) + num_before, len(tokens), sampling_params, routed
        ),
        drafts=(meta.get("spec_num_correct_drafts", 0), meta.get("spec_verify_ct", 0)),
        kept=kept,
    )


def _kept(
    meta: Mapping[str, Any], tokens: npt.NDArray[np.int64], vocab_size: int
) -> tuple[KeptTokens, npt.NDArray[np.float64]]:
    """Return the tokens that top-p and top-k kept at each of `tokens`, and log-probs among them."""
    sets = meta.get("output_token_sampling_mask")
    if sets is None:
        raise RolloutRequestError(
            "rollout.top_p and rollout.top_k need the tokens that they keep, but a rollout server "
            "returns none: install SGLang 0.5.23 there, or set rollout.top_p=1 and rollout.top_k=0"
        )
    sizes = np.fromiter(map(len, sets), np.int32, len(sets))
    ids = np.fromiter(chain.from_iterable(sets), np.int32, sizes.sum())
    logprobs = np.array(meta["output_token_sampling_logprobs"], np.float64)
    if not len(sizes) == len(logprobs) == len(tokens):
        raise ValueError(f"{len(tokens)} tokens have {len(sizes)} sets of kept tokens")
    owners = np.arange(len(tokens)).repeat(sizes)
    counts = np.bincount(owners[ids == tokens[owners]], minlength=len(tokens))
    if not (counts == 1).all() or not ((ids >= 0) & (ids < vocab_size)).all():
        raise ValueError("a token is not among the tokens that were kept when it was sampled")
    return KeptTokens(sizes, ids), logprobs


def _routed_experts(
    meta: Mapping[str, Any],
    num_before: int,
    num_tokens: int,
    sampling_params: SamplingParams,
    routed: tuple[int, int],
) -> npt.NDArray[Any] | None:
    """Return the routed experts of a response's tokens before its last one; None if none were asked
    for, or if a server had dropped its cache of a response before it was aborted. num_before:
    Tokens before those of the answer.
    """
    shape, text = sampling_params.routed_experts, meta.get("routed_experts")
    if shape is None or not num_tokens:
        return None
    aborted = str(meta["finish_reason"]["type"]) == ABORT
    if text is None and not aborted:
        raise RolloutRequestError(
            "algorithm.routing_replay=true needs the routed experts, but a rollout server returns "
            "none: start it with --enable-return-routed-experts, or set routing_replay=false"
        )
    first, kept = routed
    wanted = num_before + num_tokens - 1 - first
    routed_experts = None if text is None else shape.decode(text)[:wanted]
    if routed_experts is None or len(routed_experts) < wanted:
        if aborted:
            return None
        raise ValueError(
            f"{wanted} tokens have routed experts for "
            f"{0 if routed_experts is None else len(routed_experts)}"
        )
    return routed_experts[kept - first :].astype(shape.dtype)


def _arrays(
    items: Sequence[Sequence[Any]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the tokens and their log-probs, of items that begin with log-prob and token."""
    logprobs, tokens, *_ = zip(*items, strict=True) if items else ((), ())
    return (
        np.fromiter(tokens, np.int64, len(tokens)),
        np.fromiter(logprobs, np.float64, len(logprobs)),
    )


def _finish(
    reason: Mapping[str, Any],
    tokens: npt.NDArray[np.int64],
    num_before: int,
    sampling_params: SamplingParams,
) -> str:
    # On an abort the running step still ends, and its token may happen to finish the response.
    finish = str(reason["type"])
    if finish == ABORT and len(tokens):
        if tokens[-1] in sampling_params.stop_ids:
            return "stop"
        if num_before + len(tokens) == sampling_params.max_new_tokens:
            return "length"
    if finish not in ("stop", "length", ABORT):
        raise ValueError(f"a response ended with {reason}")
    return finish


def parse_scores(
    answer: Any,
    prompt: "Prompt",
    responses: Sequence[Response],
    num_prompt_tokens: int,
    top_k: int = 0,
) -> list[TeacherLogprobs]:
    """Return the log-probs of each response in an answer to `score_body`. num_prompt_tokens, top_k:
    As in the request.

    Raises MALFORMED for an answer of another form, and RolloutRequestError if the server counts
    other prompt tokens, reads other tokens, or does not return the likeliest tokens as arrays.
    """
    found = []
    for item, response in zip(_items(answer, len(responses)), responses, strict=True):
        meta, num_tokens = item["meta_info"], len(response.token_ids)
        counted, expected = meta["prompt_tokens"], num_prompt_tokens + num_tokens
        if counted != expected:
            raise RolloutRequestError(
                f"{prompt.row.source}: the server counts {counted} tokens of prompt and response "
                f"instead of {expected}; it reads the prompt's tokens otherwise"
            )
        tokens, logprobs = _arrays(meta["input_token_logprobs"][1:])
        if not np.array_equal(tokens, response.token_ids):
            raise RolloutRequestError(
                f"{prompt.row.source}: the server gives log-probs of other tokens than the "
                "response's, as it does if this spells an image token"
            )
        if not (np.abs(logprobs) <= LARGEST).all():  # NaN is not either
            raise ValueError("log-probs that are not finite")
        top = _top_tokens(meta, num_tokens, top_k) if top_k else None
        found.append(TeacherLogprobs(logprobs.astype(np.float32), top))
    return found


def _top_tokens(meta: Mapping[str, Any], num_tokens: int, top_k: int) -> TopTokens:
    name = "input_top_logprobs"
    if f"{name}_shape" not in meta:
        raise RolloutRequestError(
            "distillation.divergence=forward_topk needs the likeliest tokens at each position, but "
            "the teacher's server does not return them in base64: install SGLang 0.5.23 there, or "
            "set distillation.divergence=sampled"
        )
    values, ids = (
        np.frombuffer(base64.b64decode(meta[f"{name}_{part}_flat_b64"]), dtype).copy()
        for part, dtype in (("val", "<f4"), ("idx", "<i4"))
    )
    # No token precedes the first one, whose place is null and not in the arrays.
    if not len(values) == len(ids) == num_tokens * top_k or meta[f"{name}_null_prefix"] != 1:
        raise ValueError(f"{len(ids)} likeliest tokens of {num_tokens} with {top_k} each")
    if not np.isfinite(values).all() or (ids < 0).any():
        raise ValueError("likeliest tokens whose log-probs are not finite")
    return TopTokens(ids.reshape(-1, top_k), values.reshape(-1, top_k))
