"""The source of the groups that a step trains on: the one door through which experience comes."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from megavlm.environments.curriculum import Curriculum
from megavlm.inference.connect import Connection
from megavlm.observability.phases import Phases
from megavlm.rollout.ahead.handle import AheadSource
from megavlm.rollout.in_step import InStepSource
from megavlm.rollout.replay import ReplaySource
from megavlm.rollout.sampler import Refit, Sampler
from megavlm.rollout.trajectory import Group
from megavlm.rollout.wave import Wave


class GroupSource(Protocol):
    """Source of groups, on the driver only.

    measures: Metrics of the last `take`, under their names in observability/metrics.py.
    """

    measures: dict[str, float]

    def take(self, count: int, version: int, refit: Refit | None) -> list[Group]:
        """Return played groups for the next step: `count`, or more with dynamic sampling, because
        it replaces groups without signal by further prompts. It is called once per step.

        version: Version of the current weights, equal to the number of finished steps. refit:
        Pushes the weights to servers that restarted; None if the servers keep the weights that
        they started with.

        Raises the errors of rollouts: ValueError for rows or environments that cannot be used,
        RewardStop, RolloutRequestError and RolloutServerError.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the position in the data, and the groups that were
        started and not trained on. All sources read the states of all others.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if it was taken with other data."""

    def close(self) -> None:
        """End all processes of the source."""


@runtime_checkable
class WaveSource(GroupSource, Protocol):
    """Source that can also hand over the groups of a step as they are played."""

    def waves(
        self, count: int, version: int, refit: Refit | None, least_tokens: int
    ) -> Iterator[Wave]:
        """Yield the groups to train on in the step, in waves. Only the last wave may have fewer
        than `least_tokens` tokens. Generation goes on between two waves. Raises as `take` does.
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
    if rollout.max_staleness == 0 and not rollout.overlap:
        return InStepSource(sampler, curriculum, phases)
    assert connection is not None
    return AheadSource(sampler.config, connection, curriculum, phases)
