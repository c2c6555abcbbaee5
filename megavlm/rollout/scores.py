"""Scores of a played group: rewards of the whole group."""

from collections.abc import Sequence

from megavlm.data.chat.messages import Message
from megavlm.data.rows import Row
from megavlm.inference.protocol import Response
from megavlm.rewards.base import Example, ResponseDetails
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.trajectory import Group


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
