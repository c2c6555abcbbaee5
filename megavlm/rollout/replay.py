"""Groups of a recorded run (rollout.replay)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megavlm.config.algorithm import PolicyOptimization, replays_routing
from megavlm.observability.phases import Phases
from megavlm.rollout.backlog import backlog_state
from megavlm.rollout.buffer import StreamBatch
from megavlm.rollout.recorded import RecordedRollouts
from megavlm.rollout.sampler import Refit, Sampler
from megavlm.rollout.teachers import has_teacher
from megavlm.rollout.trajectory import Group


class ReplaySource:
    """Implements GroupSource. A replay draws no prompts, so that the position in the data and the
    groups that wait there are as they were at its start.
    """

    def __init__(self, sampler: Sampler, folder: str, phases: Phases) -> None:
        self._sampler, self._folder, self._phases = sampler, folder, phases
        self._stream = sampler.prompt_stream()
        self._backlog = backlog_state([])
        self.measures: dict[str, float] = {}

    def stream(
        self, version: int, refit: Refit | None, least_tokens: int | None = None
    ) -> Iterator[StreamBatch[Group]]:
        """Yield the recorded step as one batch; the groups that were trained on come first. Raises
        ValueError as RecordedRollouts.load does, and if the step has too few groups or lacks the
        experts of algorithm.routing_replay or the log-probs of a teacher.
        """
        sampler, step, algorithm = self._sampler, version + 1, self._sampler.config.algorithm
        assert isinstance(algorithm, PolicyOptimization)
        count = algorithm.prompts_per_step
        with self._phases("rollout"):
            recorded = RecordedRollouts(self._folder)
            groups = recorded.load(step, sampler.rows, sampler.processor)
        if len(groups) < count:
            raise ValueError(
                f"rollout.replay={self._folder} has {len(groups)} groups in step {step}, fewer "
                f"than algorithm.prompts_per_step={count}: lower that"
            )
        responses = [r for group in groups for e in group.episodes for r in e.responses]
        replays = replays_routing(algorithm)
        if replays and all(response.routed_experts is None for response in responses):
            raise ValueError(
                f"algorithm.routing_replay=true replays experts, but rollout.replay={self._folder} "
                f"has none in step {step}: record them with routing_replay=true, or set it to false"
            )
        distillation = sampler.config.distillation
        scored = [group for group in groups if has_teacher(distillation, group.prompt.row)]
        if not _has_scores(scored, distillation.top_k):
            raise ValueError(
                f"distillation.teachers has teachers, but rollout.replay={self._folder} has no "
                f"log-probs of them with distillation.top_k={distillation.top_k} in step {step}: "
                "record them so, or remove distillation.teachers"
            )
        self.measures = self._stream.measures
        yield StreamBatch(groups[:count], range(count), left_out=groups[count:])

    def state_dict(self) -> dict[str, Any]:
        return {**self._stream.state_dict(), "backlog": self._backlog}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state)
        self._backlog = state["backlog"]

    def close(self) -> None:
        self._stream.close()


def _has_scores(groups: Sequence[Group], top_k: int) -> bool:
    """Return True if a response has a teacher's log-probs (with `top_k`, so many likeliest tokens),
    or if none was asked of a teacher or got an answer.
    """
    episodes = [
        episode
        for group in groups
        for episode in group.episodes
        if episode.score.failure is None and not episode.score.skipped
    ]
    responses = [response for episode in episodes for response in episode.responses]
    if not top_k:
        return not episodes or any(r.teacher_logprobs is not None for r in responses)
    tops = [r.teacher_top for r in responses if r.teacher_top is not None]
    return not episodes or any(top.ids.shape[1] == top_k for top in tops)
