"""The plan of a step: which rank trains on which packs of which minibatch, and the pictures it
needs for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megavlm.data.balance import assign
from megavlm.data.packing import Pack, Tree, make_pack
from megavlm.data.processor import Picture
from megavlm.training.cost import TreeCost


@dataclass(frozen=True)
class Minibatch:
    """One update: this rank's packs, and the number of targets that all ranks have together."""

    packs: list[Pack]
    num_targets: int


@dataclass(frozen=True)
class Work:
    """One rank's share of a step."""

    minibatches: list[Minibatch]
    pictures: dict[str, Picture]
    num_tokens_everywhere: int  # prompts and responses, on all ranks together

    def to(self, device: torch.device) -> "Work":
        """The same with its packs on `device`; pictures go there when they are encoded."""
        moved = [replace(m, packs=[pack.to(device) for pack in m.packs]) for m in self.minibatches]
        return replace(self, minibatches=moved)


def plan_step(
    minibatches: Sequence[Sequence[Tree]],
    pictures: Mapping[str, Picture],
    *,
    num_ranks: int,
    pack_tokens: int,
    image_token_id: int,
    multiple: int,
    cost: TreeCost,
) -> list[Work]:
    """Work by data rank. Trees are packed and balanced by modelled cost; a picture goes only where
    it is needed.
    """
    num_tokens = sum(tree.num_tokens for trees in minibatches for tree in trees)
    works = [Work([], {}, num_tokens) for _ in range(num_ranks)]
    for trees in minibatches:
        num_targets = sum(len(s.token_ids) for tree in trees for s in tree.segments if s.is_target)
        for work, parts in zip(works, assign(trees, num_ranks, pack_tokens, cost), strict=True):
            packs = [
                make_pack(part, vision_token_ids={image_token_id}, multiple=multiple)
                for part in parts
            ]
            work.minibatches.append(Minibatch(packs, num_targets))
            work.pictures.update(
                {key: _unsent(pictures[key]) for pack in packs for key in pack.pictures}
            )
    return works


def _unsent(picture: Picture) -> Picture:
    """Without the encoded file, which only the rollout servers need."""
    return replace(picture, png=b"")
