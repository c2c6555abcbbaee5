"""Responses from plain numbers, and their plain values."""

from collections.abc import Sequence
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


def plain(response: Response) -> tuple[Any, ...]:
    """Return all values of a response, to be compared."""
    ids, logprobs = response.token_ids.tolist(), response.logprobs.tolist()
    return ids, logprobs, response.finish, response.weight_version, response.spans
