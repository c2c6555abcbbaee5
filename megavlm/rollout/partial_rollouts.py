"""Partial rollouts: a step draws more prompts than it needs, and those whose responses are slow are
finished by later steps, under newer weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megavlm.data.processor import Prompt
from megavlm.inference.protocol import Response, VersionSpan
from megavlm.rollout.trajectory import Group


class PartialRolloutBuffer:
    """Groups that earlier steps have drawn and not trained on, the oldest first."""

    def __init__(self) -> None:
        self._waiting: list[Group] = []

    def take(self, count: int, draw: Callable[[int], list[Prompt]]) -> list[Group]:
        """Return `count` groups to roll out: waiting ones first, then new prompts."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return [*taken, *map(Group, draw(count - len(taken)))]

    def split(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups that were played. The others wait for the next step, with the responses
        that they have.
        """
        unfinished = [Group(g.prompt, g.responses) for g in groups if not g.is_played]
        self._waiting = unfinished + self._waiting
        return [group for group in groups if group.is_played]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return row indices and sampled responses as plain values."""
        return [
            {
                "row": group.prompt.row.index,
                "responses": [asdict(response) for response in group.responses],
            }
            for group in self._waiting
        ]

    def load_state_dict(
        self, state: Sequence[Mapping[str, Any]], prompt: Callable[[int], Prompt]
    ) -> None:
        """Restore a state. `prompt` makes the prompt of a row, by its index."""
        self._waiting = [
            Group(prompt(item["row"]), tuple(map(_response, item["responses"]))) for item in state
        ]


def stale_tokens(response: Response, version: int) -> Tensor:
    """Return [L] bool: True at tokens that other weights than `version` sampled."""
    flags = torch.zeros(len(response.token_ids), dtype=torch.bool)
    for span in response.spans:
        if span.version != str(version):
            flags[span.start : span.end] = True
    return flags


def staleness_metrics(responses: Sequence[Response]) -> dict[str, float]:
    """Return metrics of tokens from older weights, empty where one version sampled everything."""
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
