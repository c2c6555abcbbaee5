"""Teachers of a run: they score the responses of played groups."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from megavlm.config.distillation import Distillation, TeacherConfig
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.inference.errors import RolloutRequestError
from megavlm.inference.protocol import Response, Scored, TeacherLogprobs
from megavlm.inference.teacher import Teacher
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.trajectory import Episode, Group
from megavlm.subprocess_pool.failure import CallFailure

# RolloutClient.generate with sampling and weights bound.
Generate = Callable[..., Awaitable[object]]


class Teachers:
    """The teachers in `distillation.teachers`. A group has one of them, or none."""

    def __init__(self, settings: Distillation, processor: Processor) -> None:
        self._settings, self._processor = settings, processor
        self._clients = {
            name: Teacher(settings, name)
            for name, teacher in settings.teachers.items()
            if not teacher.is_policy
        }

    def scores(self, group: Group) -> bool:
        """Return True if a teacher scores the group."""
        return has_teacher(self._settings, group.prompt.row)

    async def score(
        self, group: Group, generate: Generate, rewards: RewardManager, where: str
    ) -> None:
        """Add the teacher's log-probs to the responses of a group, apart from those that are not
        trained on. A failure counts as a failed reward.

        generate: Scores by the policy itself. where: Name of the environment and the row, for
        messages. Raises ValueError for images that the teacher does not take and for a prompt
        that has no place for a hint, and the errors of `generate`.
        """
        row = group.prompt.row
        name = self._settings.teacher_of(row.category)
        assert name is not None
        hint, client = hint_for(row, self._settings.teachers[name]), self._clients.get(name)
        calls: dict[Prompt, list[tuple[Episode, int]]] = {}  # all first turns have one prompt
        for episode in group.episodes:
            for turn, prompt in enumerate(episode.prompts if not episode.score.skipped else ()):
                calls.setdefault(prompt, []).append((episode, turn))

        async def ask(prompt: Prompt, places: Sequence[tuple[Episode, int]]) -> None:
            responses = [episode.responses[turn] for episode, turn in places]
            read = self._processor.hinted(prompt, hint) if hint else prompt
            try:
                if client is None:
                    top_k = self._settings.top_k
                    found = await _by_policy(generate, read, Scored(responses, top_k))
                else:
                    found = await client.logprobs(read, responses)
            except CallFailure as failure:
                named = CallFailure(failure.kind, f"{where}: {failure}")
                for episode, _ in places:
                    if episode.score.failure is None:
                        episode.add_group_score(rewards.failed(named))
                return
            for (episode, turn), scores in zip(places, found, strict=True):
                episode.responses[turn] = episode.responses[turn].with_scores(scores)

        await asyncio.gather(*(ask(*call) for call in calls.items()))
        group.awaits_teacher = False

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


def has_teacher(settings: Distillation, row: Row) -> bool:
    """Return True if one of the teachers scores the responses to a row."""
    name = settings.teacher_of(row.category)
    return name is not None and hint_for(row, settings.teachers[name]) is not None


def hint_for(row: Row, teacher: TeacherConfig) -> str | None:
    """Return the hint that the teacher reads with a row: "" for a teacher without hints, None if a
    column of the hint is empty in the row.
    """
    values = {"answer": row.answer, **row.extra}
    if any(values.get(column) in (None, "") for column in teacher.columns):
        return None
    return (teacher.hint or "").format_map(values)


async def _by_policy(generate: Generate, prompt: Prompt, scored: Scored) -> list[TeacherLogprobs]:
    """Return the log-probs of each response by the policy, on its rollout servers. Raises
    CallFailure if they refuse the request or give none in time.
    """

    async def ignore(*_: object) -> None:
        pass

    answers: list[list[Response]] = [[]]
    try:
        await generate(
            [prompt], n=len(scored.responses), groups=answers, scored=scored, on_complete=ignore
        )
    except RolloutRequestError as error:
        raise CallFailure("remote", str(error)) from error
    found = [
        TeacherLogprobs(response.teacher_logprobs, response.teacher_top)
        for response in answers[0]
        if response.teacher_logprobs is not None
    ]
    if len(found) != len(scored.responses):
        raise CallFailure("timeout", "the rollout servers gave no log-probs in time")
    return found
