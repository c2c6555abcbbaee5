"""Scores of a played group: rewards of the whole group, and a teacher's log-probs of its
responses.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from megavlm.data.chat.messages import Message
from megavlm.data.processor import Prompt
from megavlm.data.rows import Row
from megavlm.inference.protocol import Response
from megavlm.inference.teacher import Teacher
from megavlm.rewards.base import Example, ResponseDetails
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.trajectory import Episode, Group
from megavlm.subprocess_pool.failure import CallFailure


async def add_group_rewards(
    group: Group, rewards: RewardManager, system_prompt: str | None
) -> None:
    """Add the rewards of the whole group to its episodes, apart from those that have failed."""
    scores = await rewards.score_group(
        [episode.texts[-1] for episode in group.episodes],
        [details(episode.responses[-1], episode.texts) for episode in group.episodes],
        group.scores,
        example(group.prompt.row, system_prompt),
        group.stage,
    )
    for episode, score in zip(group.episodes, scores, strict=True):
        if episode.score.failure is None:
            episode.add_group_score(score)
    group.awaits_reward = False


async def ask_teacher(group: Group, teacher: Teacher, rewards: RewardManager, name: str) -> None:
    """Add the teacher's log-probs to the responses of a group, apart from those that are not
    trained on. A failure is that of a reward. name: Name of the environment and the row, for
    messages.
    """
    calls: dict[Prompt, list[tuple[Episode, int]]] = {}  # all first turns have one prompt
    for episode in group.episodes:
        for turn, prompt in enumerate(episode.prompts if not episode.score.skipped else ()):
            calls.setdefault(prompt, []).append((episode, turn))

    async def ask(prompt: Prompt, places: Sequence[tuple[Episode, int]]) -> None:
        responses = [episode.responses[turn] for episode, turn in places]
        try:
            found = await teacher.logprobs(prompt, responses)
        except CallFailure as failure:
            named = CallFailure(failure.kind, f"{name}: {failure}")
            for episode, _ in places:
                if episode.score.failure is None:
                    episode.add_group_score(rewards.failed(named))
            return
        for (episode, turn), (logprobs, top) in zip(places, found, strict=True):
            response = episode.responses[turn]
            scored = replace(response, teacher_logprobs=logprobs, teacher_top=top)
            episode.responses[turn] = scored

    await asyncio.gather(*(ask(*call) for call in calls.items()))
    group.awaits_teacher = False


def example(row: Row, system_prompt: str | None = None) -> Example:
    """Return the row in the form that rewards and environments receive. system_prompt: Added to a
    row without a system message.
    """
    messages = row.messages or (Message("user", row.problem),)
    if system_prompt is not None and messages[0].role != "system":
        messages = (Message("system", system_prompt), *messages)
    chat = tuple({"role": m.role, "content": m.text, **m.keys} for m in messages)
    return Example(row.problem, row.answer, row.category, row.images, row.extra, chat)


def details(response: Response, turns: Sequence[str]) -> ResponseDetails:
    """Return the facts about a response that rewards may ask for. turns: Texts of the episode's
    responses up to this one.
    """
    return ResponseDetails(response.finish, tuple(turns), response.token_ids)
