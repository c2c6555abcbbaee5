"""Turns and episodes as they were played, and the trees that training makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from megavlm.data.packing import Segment, Tree
from megavlm.data.positions import text_positions
from megavlm.data.processor import Prompt
from megavlm.data.targets import TargetColumns
from megavlm.inference.protocol import Response
from megavlm.rewards.base import Score


@dataclass(frozen=True, eq=False)
class Turn:
    """`prompt`: all the tokens before the response."""

    prompt: Prompt
    response: Response
    text: str
    reward: float


@dataclass(frozen=True, eq=False)
class Episode:
    """`score`: its reward is the sum over turns."""

    turns: tuple[Turn, ...]
    score: Score

    @property
    def response(self) -> Response:
        """All the sampled tokens, as if they were one response."""
        last = self.turns[-1].response
        return replace(
            last,
            token_ids=tuple(token for turn in self.turns for token in turn.response.token_ids),
            logprobs=tuple(value for turn in self.turns for value in turn.response.logprobs),
        )

    @property
    def text(self) -> str:
        return "\n\n".join(turn.text for turn in self.turns)


def episode_tree(
    prompt: Prompt, episodes: Sequence[Episode], columns: Sequence[TargetColumns]
) -> Tree:
    """The prompt once, and each episode as a chain of responses and observations below it.

    prompt: of the episodes' first turns. columns: per episode, of its L sampled tokens.
    """
    segments = [Segment(prompt.token_ids, prompt.positions, parent=-1, is_target=False)]
    images = [image.key for image in prompt.images]
    for episode, its_columns in zip(episodes, columns, strict=True):
        parent, start = 0, 0
        for turn, following in zip_longest(episode.turns, episode.turns[1:]):
            ids = turn.response.token_ids
            end = start + len(ids)
            part = its_columns.select(slice(start, end))
            positions = text_positions(len(ids), turn.prompt.next_position)
            segments.append(Segment(torch.tensor(ids), positions, parent, True, part))
            parent, start = len(segments) - 1, end
            if following is not None:
                known = len(turn.prompt.token_ids) + len(ids)
                observed = following.prompt.token_ids[known:]
                positions = following.prompt.positions[:, known:]
                segments.append(Segment(observed, positions, parent, is_target=False))
                parent = len(segments) - 1
                shown = following.prompt.images[len(turn.prompt.images) :]
                images += [image.key for image in shown]
    return Tree(tuple(segments), tuple(images))
