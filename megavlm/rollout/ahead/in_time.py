"""Choice of the groups that a step trains on, when slower ones may wait for a later step."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadlines:
    """Rules of partial rollouts ahead of training: a group is trained on at most `staleness` steps
    after the weights of its oldest token, and each step trains on at least `per_step` groups.
    """

    staleness: int
    per_step: int

    def choose(
        self, versions: Sequence[int], played: Sequence[bool], wanted: int, step: int
    ) -> list[int]:
        """Return the groups that step `step` trains on next: `wanted` of the played ones, those of
        the oldest weights first. The result is empty if fewer are played, or if without a group
        that is not played yet a later step would have more groups that are due than it trains on.

        versions: Weight version of the oldest token of each group, in the order in which their
        prompts were drawn. played: True for each group that is played to its end.
        """
        ready = [number for number, is_played in enumerate(played) if is_played]
        chosen = sorted(ready, key=lambda number: versions[number])[:wanted]
        for further in range(self.staleness + 1):
            # Groups of these weights are too old for the steps after `further` further ones.
            last = step - self.staleness + further
            due = sum(version <= last for version in versions) - further * self.per_step
            if sum(versions[number] <= last for number in chosen) < min(due, wanted):
                return []
        return chosen if len(chosen) == wanted else []
