"""Partial rollouts: a step draws more prompts than it needs, and those whose responses are slow are
finished by later steps, under newer weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megavlm.data.processor import Prompt
from megavlm.inference.protocol import Response, VersionSpan, is_complete


@dataclass(frozen=True, eq=False)
class Asked:
    """A prompt and what earlier steps have of its responses: nothing, or as many as a group has,
    some of them aborted.
    """

    prompt: Prompt
    responses: Sequence[Response] = ()


class PartialRolloutBuffer:
    """What earlier steps have drawn and not trained on, the oldest first."""

    def __init__(self) -> None:
        self._waiting: list[Asked] = []

    def ask(
        self, count: int, oversample: float, draw: Callable[[int], list[Prompt]]
    ) -> list[Asked]:
        """The prompts of a rollout that needs `count` groups: what waits, and new ones."""
        wanted = math.ceil(count * oversample)
        taken, self._waiting = self._waiting[:wanted], self._waiting[wanted:]
        return [*taken, *map(Asked, draw(wanted - len(taken)))]

    def split(
        self, asked: Sequence[Asked], answers: Sequence[Sequence[Response]], count: int
    ) -> list[list[Response]]:
        """The first `count` complete groups in their places; empty where a group waits for the next
        step, with what it has.
        """
        kept: list[list[Response]] = []
        waiting = []
        for item, responses in zip(asked, answers, strict=True):
            is_kept = is_complete(responses) and sum(map(bool, kept)) < count
            kept.append(list(responses) if is_kept else [])
            if not is_kept:
                waiting.append(Asked(item.prompt, tuple(responses)))
        self._waiting = waiting + self._waiting
        return kept

    def state_dict(self) -> list[dict[str, Any]]:
        """Rows by index, and all that was sampled: plain values."""
        return [
            {
                "row": item.prompt.row.index,
                "responses": [asdict(response) for response in item.responses],
            }
            for item in self._waiting
        ]

    def load_state_dict(
        self, state: Sequence[Mapping[str, Any]], prompt: Callable[[int], Prompt]
    ) -> None:
        """`prompt`: that of a row, by its index."""
        self._waiting = [
            Asked(prompt(item["row"]), tuple(map(_response, item["responses"]))) for item in state
        ]


def older(response: Response, version: int) -> Tensor:
    """Return [L] bool: True at tokens that other weights than `version` sampled."""
    flags = torch.zeros(len(response.token_ids), dtype=torch.bool)
    for span in response.spans:
        if span.version != str(version):
            flags[span.start : span.end] = True
    return flags


def staleness(responses: Sequence[Response]) -> dict[str, float]:
    """By the names of observability/metrics.py; empty where one version sampled everything."""
    spans = [span for response in responses for span in response.spans]
    versions = {span.version for span in spans}
    if len(versions) < 2:
        return {}
    newest = max(map(int, versions))
    lags = [(newest - int(span.version), span.end - span.start) for span in spans]
    return {
        "stale_share": sum(size for lag, size in lags if lag) / sum(size for _, size in lags),
        "stale_steps": float(max(lag for lag, _ in lags)),
    }


def _response(values: Mapping[str, Any]) -> Response:
    return Response(
        token_ids=tuple(values["token_ids"]),
        logprobs=tuple(values["logprobs"]),
        finish=values["finish"],
        weight_version=values["weight_version"],
        spans=tuple(VersionSpan(**span) for span in values["spans"]),
    )
