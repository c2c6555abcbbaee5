"""Groups that are made within the step, from the weights that the step updates.

With rollout.oversample a step starts more prompts than it needs, and later steps finish the slow
ones under newer weights (partial rollouts).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megavlm.config.algorithm import PolicyOptimization
from megavlm.environments.curriculum import Curriculum
from megavlm.observability.phases import Phases
from megavlm.rollout.backlog import TimedOutGroups, group_state, restored_group
from megavlm.rollout.groups import until_signal
from megavlm.rollout.sampler import Refit, Sampler
from megavlm.rollout.trajectory import Group


class InStepSource:
    """Implements GroupSource."""

    def __init__(self, sampler: Sampler, curriculum: Curriculum, phases: Phases) -> None:
        """phases: Clock for the phases `data`, `reward` and `rollout`."""
        algorithm, self._rollout = sampler.config.algorithm, sampler.config.rollout
        assert isinstance(algorithm, PolicyOptimization)
        self._sampler, self._algorithm = sampler, algorithm
        self._curriculum, self._phases = curriculum, phases
        self._stream = sampler.prompt_stream()
        self._waiting: list[Group] = []  # started and not trained on, the oldest first
        self._timed_out = TimedOutGroups(self._rollout.timed_out, algorithm.prompts_per_step)
        self.measures: dict[str, float] = {}

    def take(self, count: int, version: int, refit: Refit | None) -> list[Group]:
        groups = until_signal(
            count,
            self._algorithm.dynamic_sampling,
            lambda missing: self._sample(missing, version, refit),
        )
        kept, timed_out = self._timed_out.end_step()
        self._waiting += kept
        self.measures = self._stream.measures | timed_out
        return groups

    def _sample(self, count: int, version: int, refit: Refit | None) -> list[Group]:
        """Return `count` played groups. All others wait for a later step."""
        sampler, phases, episodes = self._sampler, self._phases, self._sampler.episodes
        skip = self._rollout.timed_out != "fail"
        weights = None if refit is None else version
        generate = sampler.generate(sampler.sampling, weights, refit, skip=skip)
        played: list[Group] = []
        while (missing := count - len(played)) > 0:  # repeats if requests timed out
            with phases("data"):
                groups = self._draw(math.ceil(missing * self._rollout.oversample))
            with phases("reward"):
                groups = episodes.start_or_replace(
                    groups,
                    self._algorithm.responses_per_prompt,
                    self._stream.take,
                    stage=self._curriculum.stage(version),
                    step=version,
                )
                self._stream.skipped.update(episodes.take_skipped())
            episodes.play(groups, generate, enough=missing, phases=phases)
            played += self._collect(groups)
        return played

    def _draw(self, count: int) -> list[Group]:
        """Return `count` groups to play: waiting ones first, then new prompts."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return [*taken, *map(Group, self._stream.take(count - len(taken)))]

    def _collect(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups that were played to the end. Other groups wait for the next step with
        the responses received so far. Raises RolloutServerError if too many timed out.
        """
        for group in groups:
            if group.timed_out:
                self._timed_out.add(group)
        left = (group for group in groups if not group.is_played and not group.timed_out)
        unfinished = [Group(group.prompt, group.responses, step=group.step) for group in left]
        self._waiting = unfinished + self._waiting
        return [group for group in groups if group.is_played]

    def state_dict(self) -> dict[str, Any]:
        backlog = [group_state(group, group.responses) for group in self._waiting]
        return {**self._stream.state_dict(), "backlog": backlog}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state)
        sampler = self._sampler
        self._waiting = [
            restored_group(values, lambda index: sampler.processor.prompt(sampler.rows[index]))
            for values in state["backlog"]
        ]

    def close(self) -> None:
        self._stream.close()
