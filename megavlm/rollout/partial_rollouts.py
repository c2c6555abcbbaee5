"""Partial rollouts: a step starts more prompts than it needs, and later steps finish the slow ones,
under newer weights.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megavlm.data.processor import Prompt
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.protocol import Response, VersionSpan
from megavlm.rollout.trajectory import Group


class TimedOutGroups:
    """Counts the groups of a step whose requests timed out, and drops them or keeps them for a
    later step (rollout.timed_out).
    """

    def __init__(self, handling: str, most: int) -> None:
        """most: Maximum groups of a step that may time out, equal to the groups that a step trains
        on.
        """
        self._handling, self._most = handling, most
        self._kept: list[Group] = []
        self._count = 0

    def add(self, group: Group) -> None:
        """Count a group. Raises RolloutServerError after too many."""
        self._count += 1
        if self._handling == "requeue":
            self._kept.append(Group(group.prompt))
        if self._count > self._most:
            raise RolloutServerError(
                f"the requests of {self._count} groups of a step timed out, more than the "
                f"algorithm.prompts_per_step={self._most} groups that it trains on: raise "
                "rollout.request_timeout, or lower rollout.concurrency, rollout.image_tokens or "
                "rollout.max_new_tokens; the run can resume from its last checkpoint"
            )

    def end_step(self) -> tuple[list[Group], dict[str, float]]:
        """Return the groups to be generated again by a later step, and the step's metrics."""
        kept, self._kept = self._kept, []
        count, self._count = self._count, 0
        return kept, {} if self._handling == "fail" else {"timed_out_groups": float(count)}


class PartialRolloutBuffer:
    """Groups that earlier steps have started and not trained on, the oldest first."""

    def __init__(self, timed_out: TimedOutGroups) -> None:
        self._waiting: list[Group] = []
        self._timed_out = timed_out

    def take(self, count: int, draw: Callable[[int], list[Prompt]]) -> list[Group]:
        """Return `count` groups to roll out: waiting ones first, then new prompts."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return [*taken, *map(Group, draw(count - len(taken)))]

    def split(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups that were played to the end. Other groups wait for the next step with
        the responses received so far. Raises RolloutServerError if too many timed out.
        """
        for group in groups:
            if group.timed_out:
                self._timed_out.add(group)
        left = (g for g in groups if not g.is_played and not g.timed_out)
        unfinished = [Group(group.prompt, group.responses) for group in left]
        self._waiting = unfinished + self._waiting
        return [group for group in groups if group.is_played]

    def end_step(self) -> dict[str, float]:
        """Return the step's metrics. Groups that timed out during the step and are kept now wait
        for a later step.
        """
        kept, metrics = self._timed_out.end_step()
        self._waiting += kept
        return metrics

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
        """Restore a state. prompt: Function that returns the prompt of a row, by its index."""
        self._waiting = [
            Group(prompt(item["row"]), tuple(map(response_of, item["responses"]))) for item in state
        ]


def stale_tokens(response: Response, version: int) -> Tensor:
    """Return [L] bool: True for tokens that were sampled by other weights than `version`."""
    flags = torch.zeros(len(response.token_ids), dtype=torch.bool)
    for span in response.spans:
        if span.version != str(version):
            flags[span.start : span.end] = True
    return flags


def oldest_version(group: Group) -> int:
    """Return the oldest weight version that sampled a token of a played group."""
    responses = [response for episode in group.episodes for response in episode.responses]
    return min(int(span.version) for response in responses for span in response.spans)


def staleness_metrics(
    responses: Sequence[Response], version: int | None = None
) -> dict[str, float]:
    """Return metrics of tokens from weights older than `version`, by default the newest that
    sampled: their share, the age of the oldest in steps, and the share of responses by the age of
    their oldest token. The result is empty if no token is older.
    """
    ages = [[(int(span.version), span.end - span.start) for span in r.spans] for r in responses]
    newest = max((v for spans in ages for v, _ in spans), default=0) if version is None else version
    lags = [(newest - v, size) for spans in ages for v, size in spans]
    if not any(lag for lag, _ in lags):
        return {}
    oldest = Counter(newest - min(v for v, _ in spans) for spans in ages if spans)
    return {
        "stale_share": sum(size for lag, size in lags if lag) / sum(size for _, size in lags),
        "stale_steps": float(max(lag for lag, _ in lags)),
        **{f"staleness/{age}": oldest[age] / oldest.total() for age in range(max(oldest) + 1)},
    }


def response_of(values: Mapping[str, Any]) -> Response:
    """Restore a response from its values in a state."""
    return Response(
        token_ids=tuple(values["token_ids"]),
        logprobs=tuple(values["logprobs"]),
        finish=values["finish"],
        weight_version=values["weight_version"],
        spans=tuple(VersionSpan(**span) for span in values["spans"]),
    )
