"""Scoring of responses by one reward or a weighted sum, with the policy for rewards that fail."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megavlm.config.curriculum import CurriculumStage
from megavlm.config.reward import Reward
from megavlm.numbers import at_least, is_float32
from megavlm.rewards import registry
from megavlm.rewards.base import Example, ResponseDetails, RewardStop, Score
from megavlm.rewards.pool import RewardPool
from megavlm.rewards.services import RemoteOptions, RemoteReward
from megavlm.subprocess_pool.failure import CallFailure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One of several rewards. label: its name in metrics and in the weights of a curriculum. key:
    the recipe's key of its options.
    """

    label: str
    name: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    key: str = "reward.options"


class RewardManager:
    """Scores responses. `failures` counts failed rewards by kind. Used within one event loop."""

    def __init__(
        self, parts: Sequence[Part], settings: Reward, resources: ExitStack | None = None
    ) -> None:
        """Start the first reward process. settings: limits, and the policy for failures.
        resources: files that the rewards read; closed together with the rewards.

        Raises ValueError for a reward that cannot be loaded or does not have an option.
        """
        self.parts, self._settings = list(parts), settings
        self._resources = resources or ExitStack()
        self.failures: Counter[str] = Counter()
        self._remote = {
            part.label: _remote(part, settings.timeout)
            for part in parts
            if registry.is_remote(part.name)
        }
        local = [part for part in parts if part.label not in self._remote]
        self._local = {part.label: index for index, part in enumerate(local)}
        self._pool = None
        self._of_groups: list[Part] = []
        if local:
            rewards = [(part.name, part.options, part.key) for part in local]
            self._pool = RewardPool(
                rewards,
                workers=settings.workers,
                timeout=settings.timeout,
                memory_mb=settings.memory_mb,
            )
            takes = zip(local, self._pool.takes, strict=True)
            self._of_groups = [part for part, found in takes if found.is_group]
        self._of_responses = [part for part in parts if part not in self._of_groups]

    @property
    def scores_groups(self) -> bool:
        """True if a reward scores whole groups."""
        return bool(self._of_groups)

    def check(self, stage: CurriculumStage) -> None:
        """Check that a reward has each setting of a stage. Raises ValueError if none has it."""
        takes = set().union(*(self._takes(part) for part in self.parts))
        for key, given in (("weights", stage.weights), ("tolerance", stage.tolerance)):
            several = key == "weights" and len(self.parts) > 1
            if given and not several and key not in takes:
                names = ", ".join(part.name for part in self.parts)
                raise ValueError(f"curriculum.stages: {key} given, but {names} has none")
        for part in self.parts:
            registry.check_options(part.name, self._options(part, self._takes(part), stage))

    def _takes(self, part: Part) -> Sequence[str]:
        if part.label in self._remote:
            return ()
        assert self._pool is not None
        return self._pool.takes[self._local[part.label]].options

    async def score(
        self,
        response: str,
        example: Example,
        stage: CurriculumStage | None = None,
        details: ResponseDetails | None = None,
    ) -> Score:
        """Score a response by the rewards of single responses. Raises RewardStop if a reward fails
        and reward.on_failure=stop.
        """
        (score,) = await self._score(
            self._of_responses, [response], [details or ResponseDetails()], example, stage
        )
        return score

    async def score_group(
        self,
        responses: Sequence[str],
        details: Sequence[ResponseDetails],
        known: Sequence[Score],
        example: Example,
        stage: CurriculumStage | None = None,
    ) -> list[Score]:
        """Score all responses of a group by the rewards of groups. Raises RewardStop as `score`
        does.

        known: Scores of the responses without these rewards.

        Returns scores whose `reward` is to be added, and whose other fields include `known`.
        """
        found = await self._score(self._of_groups, responses, details, example, stage)
        decides = self.parts[0] in self._of_groups
        return [
            score
            if score.failure
            else replace(
                score,
                correct=score.correct if decides else before.correct,
                parts={**before.parts, **score.parts},
            )
            for score, before in zip(found, known, strict=True)
        ]

    async def _score(
        self,
        parts: Sequence[Part],
        responses: Sequence[str],
        details: Sequence[ResponseDetails],
        example: Example,
        stage: CurriculumStage | None,
    ) -> list[Score]:
        stage = stage or CurriculumStage()
        try:
            found = await asyncio.gather(
                *(self._part(part, responses, details, example, stage) for part in parts)
            )
        except CallFailure as failure:
            return [self.failed(failure) for _ in responses]
        scores = []
        for index in range(len(responses)):
            try:
                scores.append(self._combine(parts, [of_part[index] for of_part in found], stage))
            except CallFailure as failure:
                scores.append(self.failed(failure))
        return scores

    def failed(self, failure: CallFailure) -> Score:
        """Count a failure, and return the score that reward.on_failure defines for it. Raises
        RewardStop with reward.on_failure=stop.
        """
        self.failures[failure.kind] += 1
        if self.failures[failure.kind] == 1:
            logger.warning("first failure of its kind, counted as reward_failures: %s", failure)
        if self._settings.on_failure == "stop":
            raise RewardStop(
                f"a reward failed ({failure}), and reward.on_failure=stop: repair it, or set "
                "reward.on_failure to zero or skip"
            ) from failure
        skipped = self._settings.on_failure == "skip"
        return Score(self._settings.failure_value, False, failure=failure.kind, skipped=skipped)

    def _combine(
        self, parts: Sequence[Part], found: Sequence[Score], stage: CurriculumStage
    ) -> Score:
        """Return the weighted sum of a response's scores by some of the rewards. Correctness is
        decided by the first reward of all, and without it the response is not correct. Raises
        CallFailure for a sum that is not finite.
        """
        if len(self.parts) == len(parts) == 1:
            return replace(found[0], reward=_finite(parts[0].weight * found[0].reward))
        components: dict[str, float] = {}
        total, correct = 0.0, False
        for part, score in zip(parts, found, strict=True):
            total += stage.weights.get(part.label, part.weight) * score.reward
            components[part.label] = score.reward
            components |= {f"{part.label}/{name}": value for name, value in score.parts.items()}
            if part is self.parts[0]:
                correct = score.correct
        return Score(_finite(total), correct, components)

    async def _part(
        self,
        part: Part,
        responses: Sequence[str],
        details: Sequence[ResponseDetails],
        example: Example,
        stage: CurriculumStage,
    ) -> list[Score]:
        if part.label in self._remote:
            (response,) = responses
            found = [await self._remote[part.label].score(response, example)]
        else:
            assert self._pool is not None
            index = self._local[part.label]
            options = self._options(part, self._takes(part), stage)
            row, images = example.columns(), example.images
            found = await asyncio.wrap_future(
                self._pool.submit(index, responses, details, row, images, options)
            )
        return [_checked(score) for score in found]

    def _options(self, part: Part, takes: Sequence[str], stage: CurriculumStage) -> dict[str, Any]:
        options = dict(part.options)
        if stage.tolerance is not None and "tolerance" in takes:
            options["tolerance"] = stage.tolerance
        if stage.weights and len(self.parts) == 1 and "weights" in takes:
            options["weights"] = dict(stage.weights)
        return options

    async def close(self) -> None:
        for remote in self._remote.values():
            await remote.close()
        if self._pool is not None:
            self._pool.close()
        self._resources.close()


def _checked(found: Mapping[str, Any]) -> Score:
    reward, parts = found.get("reward"), found.get("parts")
    numbers = [reward, *parts.values()] if isinstance(parts, Mapping) else [None]
    for number in numbers:
        _finite(number)
    assert isinstance(reward, int | float) and isinstance(parts, Mapping)
    correct = found.get("correct")
    is_full = at_least(reward, 1) if correct is None else bool(correct)
    return Score(float(reward), is_full, dict(parts))


def _finite(number: Any) -> float:
    if not is_float32(number):
        raise CallFailure("value", f"{number!r:.50} is not a finite number")
    return float(number)


def _remote(part: Part, timeout: float) -> RemoteReward:
    is_model = part.name == registry.REWARD_MODEL
    options = dict(part.options) if is_model else {"url": part.name, **part.options}
    takes = [field.name for field in fields(RemoteOptions)]
    registry.check_names(part.name, options, takes, part.key)
    with registry.naming(part.key):
        checked = RemoteOptions.of(options)
    return RemoteReward(checked, is_model=is_model, timeout=timeout)
