"""Waves: a step's groups, handed over while others are still generated (rollout.overlap)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megavlm.rollout.trajectory import Group


@dataclass(frozen=True)
class Wave:
    """Groups of a step that are handed over together.

    places: Place of each group among the groups that the step trains on, in the order in which
    their prompts were drawn. is_last: True if no further groups of the step follow. left_out:
    Groups that the step sampled and does not train on (dynamic sampling).
    """

    groups: Sequence[Group]
    places: Sequence[int]
    is_last: bool = True
    left_out: Sequence[Group] = field(default=())


def num_tokens(group: Group) -> int:
    """Return the tokens of a played group, its prompt counted once."""
    start = len(group.start.token_ids)
    return start + sum(
        len(episode.prompts[-1].token_ids) - start + len(episode.responses[-1].token_ids)
        for episode in group.episodes
    )
