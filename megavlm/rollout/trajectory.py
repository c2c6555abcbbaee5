"""Episodes and groups, from their start to their rewards."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megavlm.config.curriculum import CurriculumStage
from megavlm.data.processor import Prompt
from megavlm.environments.base import RecordedAction
from megavlm.inference.protocol import Response
from megavlm.rewards.base import Score
from megavlm.rollout.timed_environment import TimedEnvironment


@dataclass(eq=False)
class Episode:
    """A trajectory of turns between policy and environment. It is filled while it is played.

    prompts, responses, texts, rewards and actions have one item per turn; a turn's prompt includes
    all tokens before its response. Usually it extends the turn before, but it need not. `image` of
    an action is the key of an image of the turn's prompt.

    Example, a wrong answer and a second try, which is worth half:
        prompts   [70 tokens, 70 + 4 + 12 tokens]
        texts     ["blue", "red"]  # 4 tokens each
        rewards   [0.0, 0.5]
        score     Score(reward=0.5, ...)
        next_prompt None
    """

    next_prompt: Prompt | None  # None: the episode has ended
    environment: TimedEnvironment | None = None
    prompts: list[Prompt] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    actions: list[Sequence[RecordedAction]] = field(default_factory=list)  # for the report
    score: Score = field(init=False)  # the last turn's, with the sum of rewards over turns
    counts: Counter[str] = field(default_factory=Counter)  # numbers for the log, by name

    def add_turn(
        self,
        response: Response,
        text: str,
        reward: float,
        score: Score,
        following: Prompt | None,
        actions: Sequence[RecordedAction] = (),
    ) -> None:
        assert self.next_prompt is not None, "the episode has ended"
        self.prompts.append(self.next_prompt)
        self.responses.append(response)
        self.texts.append(text)
        self.rewards.append(reward)
        self.actions.append(actions)
        self.score = replace(score, reward=sum(self.rewards))
        self.next_prompt = following
        if following is None:
            self.close()

    def count(self, numbers: Mapping[str, int]) -> None:
        """Add numbers for the log."""
        self.counts.update(numbers)

    def add_group_score(self, score: Score) -> None:
        """Add the score by rewards of the whole group to the last turn. If such a reward failed,
        the score replaces the last turn's reward, as with any other reward.
        """
        self.rewards[-1] = score.reward if score.failure else self.rewards[-1] + score.reward
        self.score = replace(score, reward=sum(self.rewards))

    def fail(self, score: Score) -> None:
        """End the episode before its next turn, and add the score of a failure to its rewards."""
        self.rewards[-1] += score.reward
        self.score = replace(score, reward=sum(self.rewards))
        self.next_prompt = None
        self.close()

    def close(self) -> None:
        """Close the environment, if it is open, also of an episode that is not played on."""
        if self.environment is not None:
            self.environment.close()
        self.environment = None

    @property
    def has_ended(self) -> bool:
        return self.next_prompt is None

    @property
    def num_tokens(self) -> int:
        """Number of the sampled tokens of all turns."""
        return sum(len(response.token_ids) for response in self.responses)

    @property
    def text(self) -> str:
        return "\n\n".join(self.texts)


class TreePart(NamedTuple):
    """Consecutive tokens of a group's tree: from `start` to `end` - 1 of a call's prompt or
    response.

    parent: Number of the part that they continue at its end; -1: none. call: Number of the turn,
    in the order of episodes and their turns. images: Keys of the images that start in them.
    """

    parent: int
    call: int
    is_response: bool
    start: int
    end: int
    images: tuple[str, ...] = ()


# No repr: asyncio.Runner formats the result of its work for an error message that is never shown.
# For groups this would print the file of every image as text, n times: 0.7 s per step for files of
# 2 MB and n = 8.
@dataclass(eq=False, repr=False)
class Group:
    """A prompt and the episodes that start from it. There are no episodes before their start.

    responses: First-turn responses sampled so far: empty, or one per episode. Some may be aborted,
    to be continued by a later step. step: Training step at which the episodes were first started;
    the seeds of their environments are computed from it. stage: Curriculum stage of the episodes.
    awaits_reward: True until rewards of the whole group are added. awaits_teacher: True until a
    teacher has scored the responses. tree: Parts of the tree of its episodes, once they are found
    (group_tree.tree_parts).

    Example, a prompt of 70 tokens with two played episodes of one turn, of 4 and 6 tokens:
        prompt     Prompt(token_ids=[70], ...)
        episodes   [Episode(rewards=[1.0], ...), Episode(rewards=[0.0], ...)]
        num_tokens 80
        tree       [TreePart(-1, 0, False, 0, 70), TreePart(0, 0, True, 0, 4),
                    TreePart(0, 1, True, 0, 6)]
    """

    prompt: Prompt
    responses: Sequence[Response] = ()
    episodes: list[Episode] = field(default_factory=list)
    step: int | None = None
    stage: CurriculumStage | None = None
    awaits_reward: bool = False
    awaits_teacher: bool = False
    tree: tuple[TreePart, ...] | None = None

    @property
    def has_ended(self) -> bool:
        """True if all episodes have ended."""
        return bool(self.episodes) and all(episode.has_ended for episode in self.episodes)

    @property
    def is_played(self) -> bool:
        """True if all episodes have ended and have all of their rewards and teacher's log-probs."""
        return self.has_ended and not (self.awaits_reward or self.awaits_teacher)

    @property
    def first_prompt(self) -> Prompt:
        """Prompt of the first turn of started episodes, before they are played."""
        prompt = self.episodes[0].next_prompt
        assert prompt is not None, "it was played"
        return prompt

    @property
    def start(self) -> Prompt:
        """First-turn prompt after the environment's reset, once the episodes are played."""
        return self.episodes[0].prompts[0]

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of all turns; together they have every image of the group."""
        return [prompt for episode in self.episodes for prompt in episode.prompts]

    @property
    def num_tokens(self) -> int:
        """Number of the tokens of a played group, its prompt counted once."""
        start = len(self.start.token_ids)
        return start + sum(
            len(episode.prompts[-1].token_ids) - start + len(episode.responses[-1].token_ids)
            for episode in self.episodes
        )

    @property
    def scores(self) -> list[Score]:
        return [episode.score for episode in self.episodes]
