"""Episodes and groups, from their start to the trees that training makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest

import numpy as np
import torch
from torch import Tensor

from megavlm.data.image_processing import ProcessedImage
from megavlm.data.packing import Segment, Tree
from megavlm.data.positions import text_positions
from megavlm.data.processor import Prompt
from megavlm.data.targets import TargetColumns
from megavlm.inference.protocol import Response
from megavlm.rewards.base import Score
from megavlm.rollout.timed_environment import TimedEnvironment


@dataclass(eq=False)
class Episode:
    """A trajectory: turns of policy and environment. Filled while it is played.

    Of each turn: the prompt (all tokens before the response), the response, its text and reward.
    """

    next_prompt: Prompt | None  # None: the episode has ended
    environment: TimedEnvironment | None = None
    prompts: list[Prompt] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    score: Score = field(init=False)  # of the last turn; its reward is the sum over turns

    def add_turn(
        self, response: Response, text: str, reward: float, score: Score, following: Prompt | None
    ) -> None:
        assert self.next_prompt is not None, "the episode has ended"
        self.prompts.append(self.next_prompt)
        self.responses.append(response)
        self.texts.append(text)
        self.rewards.append(reward)
        self.score = replace(score, reward=sum(self.rewards))
        self.next_prompt = following
        if following is None:
            self.environment = None  # it may hold images

    def fail(self, score: Score) -> None:
        """End the episode before its next turn, with the score of a failure beside its rewards."""
        self.rewards[-1] += score.reward
        self.score = replace(score, reward=sum(self.rewards))
        self.next_prompt = self.environment = None

    @property
    def has_ended(self) -> bool:
        return self.next_prompt is None

    @property
    def response(self) -> Response:
        """The sampled tokens of all turns, as one response."""
        return replace(
            self.responses[-1],
            token_ids=tuple(chain.from_iterable(r.token_ids for r in self.responses)),
            logprobs=tuple(chain.from_iterable(r.logprobs for r in self.responses)),
        )

    @property
    def text(self) -> str:
        return "\n\n".join(self.texts)


# No repr: asyncio.Runner formats what its work returns, for an error message that is not shown. Of
# groups that is the file of every image as text, n times: 0.7 s a step for files of 2 MB, n = 8.
@dataclass(eq=False, repr=False)
class Group:
    """A prompt and the episodes that start from it; none before their start.

    responses: to the first turn, as far as they are sampled: empty, or one for each episode, some
    of them aborted and to be continued by a later step. timed_out: a request of an episode was
    given up (rollout.timed_out), and not all of them are played.
    """

    prompt: Prompt
    responses: Sequence[Response] = ()
    episodes: list[Episode] = field(default_factory=list)
    timed_out: bool = False

    @property
    def is_played(self) -> bool:
        return bool(self.episodes) and all(episode.has_ended for episode in self.episodes)

    @property
    def first_prompt(self) -> Prompt:
        """The prompt of the started episodes' first turns, before they are played."""
        prompt = self.episodes[0].next_prompt
        assert prompt is not None, "it was played"
        return prompt

    @property
    def start(self) -> Prompt:
        """The prompt of the first turns, as the environment made it of `prompt`."""
        return self.episodes[0].prompts[0]

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of all turns: together they hold every image of the group."""
        return [prompt for episode in self.episodes for prompt in episode.prompts]

    @property
    def scores(self) -> list[Score]:
        return [episode.score for episode in self.episodes]


def group_tree(group: Group, columns: Sequence[TargetColumns]) -> Tree:
    """Return a tree of the prompt once, with each episode below it as a chain of responses and
    observations. `columns`: of the sampled tokens of each episode.
    """
    prompt = group.start
    root = Segment(prompt.token_ids, prompt.positions, -1, False, images=_keys(prompt.images))
    segments = [root]
    for episode, its_columns in zip(group.episodes, columns, strict=True):
        parent, start = 0, 0
        turns = zip_longest(episode.prompts, episode.responses, episode.prompts[1:])
        for before, response, following in turns:
            ids = response.token_ids
            end = start + len(ids)
            part = its_columns.select(slice(start, end))
            positions = text_positions(len(ids), before.next_position)
            segments.append(Segment(as_tensor(ids, np.int64), positions, parent, True, part))
            parent, start = len(segments) - 1, end
            if following is not None:
                known = len(before.token_ids) + len(ids)
                observed = following.token_ids[known:]
                positions = following.positions[:, known:]
                images = _keys(following.images[len(before.images) :])
                segments.append(Segment(observed, positions, parent, False, images=images))
                parent = len(segments) - 1
    return Tree(tuple(segments))


def as_tensor(values: Sequence[float], dtype: type[np.generic]) -> Tensor:
    """Return Python numbers as a tensor, in a seventh of the time of torch.tensor."""
    return torch.from_numpy(np.fromiter(values, dtype, len(values)))


def _keys(images: Sequence[ProcessedImage]) -> tuple[str, ...]:
    return tuple(image.key for image in images)
