"""Responses from plain numbers, and their plain values."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megavlm.inference.protocol import Response, VersionSpan


def make_response(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish: str = "stop",
    version: str = "0",
    spans: tuple[VersionSpan, ...] = (),
) -> Response:
    ids, values = np.array(token_ids, np.int32), np.array(logprobs, np.float32)
    return Response(ids, values, finish, version, spans)


def routed(response: Response, tokens: Sequence[int], first: int = 0) -> Response:
    """Return a response with routed experts [R, 2, 2] of the tokens from `first` on; they tell
    tokens and places apart. tokens: Those of the prompt and the response.
    """
    rows = [[[token % 250, index], [index, 5]] for index, token in enumerate(tokens)][first:-1]
    return replace(response, routed_experts=np.array(rows, np.uint8).reshape(-1, 2, 2))


def plain(response: Response) -> tuple[Any, ...]:
    """Return all values of a response, to be compared."""
    ids, logprobs = response.token_ids.tolist(), response.logprobs.tolist()
    routed_experts = (
        ()
        if response.routed_experts is None
        else (response.routed_experts.tolist(), response.routed_experts.dtype)
    )
    kept = () if response.kept is None else tuple(part.tolist() for part in response.kept)
    teacher = () if response.teacher_logprobs is None else (response.teacher_logprobs.tolist(),)
    top = () if response.teacher_top is None else tuple(x.tolist() for x in response.teacher_top)
    known = response.finish, response.weight_version, response.spans
    return ids, logprobs, *known, *routed_experts, *kept, *teacher, *top
