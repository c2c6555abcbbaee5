"""The source of the groups that a step trains on: the one door through which experience comes."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from megavlm.environments.curriculum import Curriculum
from megavlm.inference.connect import Connection
from megavlm.observability.phases import Phases
from megavlm.rollout.ahead.handle import AsyncRolloutSource
from megavlm.rollout.buffer import StreamBatch
from megavlm.rollout.local import LocalSource
from megavlm.rollout.replay import ReplaySource
from megavlm.rollout.sampler import Refit, Sampler
from megavlm.rollout.trajectory import Group


class Experience(Protocol):
    """What a run trains on, on the driver only: a source of groups, or a stream of prompts."""

    @property
    def measures(self) -> dict[str, float]:
        """Metrics of the last step, under their names in observability/metrics.py."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the position in the data, and the groups that were
        started and not trained on. All sources of groups read the states of all others.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if it was taken with other data."""

    def close(self) -> None:
        """End all processes of the source."""


class GroupSource(Experience, Protocol):
    """Source of groups."""

    def stream(
        self, version: int, refit: Refit | None, least_tokens: int | None = None
    ) -> Iterator[StreamBatch[Group]]:
        """Yield the played groups of the next step in a stream of batches:
        algorithm.prompts_per_step groups, and with the last streamed batch those that dynamic
        sampling left out. It is called once per step.

        version: Version of the current weights, equal to the number of finished steps. refit:
        Pushes the weights to servers that restarted; None if the servers keep the weights that
        they started with. least_tokens: Tokens of a streamed batch; the last one may have fewer.
        None yields the step as one batch. Where rollouts go on while the trainer trains, they go on
        between two streamed batches.

        Raises the errors of rollouts: ValueError for rows or environments that cannot be used,
        RewardStop, RolloutRequestError and RolloutServerError.
        """


def make_source(
    sampler: Sampler, connection: Connection | None, curriculum: Curriculum, phases: Phases
) -> GroupSource:
    """Return the source that the recipe asks for.

    connection: The rollout servers; a replay needs none. curriculum: Gives the stage of each step.
    phases: Clock for the phases `data`, `reward` and `rollout`.
    """
    rollout = sampler.config.rollout
    if rollout.replay is not None:
        return ReplaySource(sampler, rollout.replay, phases)
    if not rollout.is_ahead:
        return LocalSource(sampler, curriculum, phases)
    assert connection is not None
    return AsyncRolloutSource(sampler.config, connection, curriculum, phases)
