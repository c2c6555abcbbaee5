"""The plan of a step's images: the driver decides which rank encodes which image.

Ranks of the first pipeline stage are numbered in world order: data rank after data rank, each with
the `slots` ranks of its tensor and context axes.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from megavlm.data.media.image_processing import Grids


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """The images that one data rank's packs show, in an order that all data ranks share.

    With a frozen tower, rank `encoders[i]` of a group encodes image i and sends the features to the
    data ranks `shown_by[i]`. The group is the ranks of one data rank or, if `across`, of all data
    ranks. A trained tower encodes the images of each pack in its forward pass, distributed by
    `shares_of`.
    """

    keys: tuple[str, ...]
    grids: tuple[Grids, ...]
    costs: tuple[float, ...]  # modelled FLOPs
    encoders: tuple[int, ...]
    rounds: tuple[int, ...]  # round in which each image is encoded
    num_rounds: int  # equal on all ranks of the group, as each round is a collective
    shown_by: tuple[tuple[int, ...], ...]
    across: bool
    slots: int

    def indices(self, keys: Sequence[str]) -> list[int]:
        """Return the index of each distinct key, in order of first occurrence."""
        indices = {key: index for index, key in enumerate(self.keys)}
        return [indices[key] for key in dict.fromkeys(keys)]

    def shares_of(self, indices: Sequence[int]) -> list[list[int]]:
        """Return the images of a pack that each slot encodes, as positions in `indices`."""
        costs = [self.costs[index] for index in indices]
        slots = assign_encoders(costs, [range(self.slots)] * len(costs))
        return [[i for i, slot in enumerate(slots) if slot == this] for this in range(self.slots)]

    def held_by(
        self, data_rank: int, slot: int, packs: Sequence[Sequence[str]] | None
    ) -> list[int]:
        """Return the indices of the images that a rank encodes. packs: Image keys of each pack if
        the tower is trained; None if it is frozen.
        """
        if packs is None:
            me = data_rank * self.slots + slot if self.across else slot
            return [index for index, encoder in enumerate(self.encoders) if encoder == me]
        held: set[int] = set()
        for keys in packs:
            indices = self.indices(keys)
            held.update(indices[i] for i in self.shares_of(indices)[slot])
        return sorted(held)

    def receivers(self, index: int) -> Collection[int]:
        """Return the ranks of the group that need the features of image `index`."""
        return {d * self.slots + slot for d in self.shown_by[index] for slot in range(self.slots)}

    @classmethod
    def joined(cls, plans: Sequence[Self]) -> Self:
        """Return the images of several plans of a data rank as one plan for a trained tower. It
        does not say which rank of a frozen tower encodes an image.
        """
        known = {
            key: (grid, cost)
            for plan in plans
            for key, grid, cost in zip(plan.keys, plan.grids, plan.costs, strict=True)
        }
        return cls(
            keys=tuple(known),
            grids=tuple(grid for grid, _ in known.values()),
            costs=tuple(cost for _, cost in known.values()),
            encoders=(),
            rounds=(),
            num_rounds=0,
            shown_by=(),
            across=False,
            slots=plans[0].slots,
        )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the plan of its values, of which JSON makes tuples lists."""
        shown_by = tuple(map(tuple, values["shown_by"]))
        lists = {name: tuple(x) for name, x in values.items() if isinstance(x, list)}
        grids = tuple(tuple((t, h, w) for t, h, w in parts) for parts in values["grids"])
        return cls(**{**values, **lists, "grids": grids, "shown_by": shown_by})


def assign_encoders(costs: Sequence[float], allowed: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank that encodes each image. Greedily, the costliest image first, each goes to
    the least loaded of its allowed ranks.
    """
    loads: dict[int, float] = {}
    encoders = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min(allowed[index], key=lambda rank: (loads.get(rank, 0.0), rank))
        encoders[index] = least
        loads[least] = loads.get(least, 0.0) + costs[index]
    return encoders


def plan_images(
    shown: Sequence[Sequence[str]],
    grids: Mapping[str, Grids],
    costs: Mapping[str, float],
    *,
    slots: int,
    round_patches: int | None = None,
) -> list[ImagePlan]:
    """Return the plan of each data rank. shown: Keys of the images that each data rank's packs
    show. slots: Number of ranks on the tensor and context axes together. round_patches: Maximum
    patches that a rank encodes at once; a larger image is encoded by itself. None sets no limit.

    An image that several data ranks show is encoded by only one of them.
    """
    shown_by: dict[str, list[int]] = {}
    for data_rank, keys in enumerate(shown):
        for key in dict.fromkeys(keys):
            shown_by.setdefault(key, []).append(data_rank)
    keys = list(shown_by)
    across = any(len(data_ranks) > 1 for data_ranks in shown_by.values())
    allowed = [[d * slots + slot for d in shown_by[key] for slot in range(slots)] for key in keys]
    encoders = dict(zip(keys, assign_encoders([costs[key] for key in keys], allowed), strict=True))
    patches = {key: sum(map(math.prod, grids[key])) for key in keys}
    rounds = _rounds(encoders, patches, round_patches)
    plans = []
    for data_rank in range(len(shown)):
        mine = [key for key in keys if data_rank in shown_by[key]]
        first = 0 if across else data_rank * slots
        plans.append(
            ImagePlan(
                keys=tuple(mine),
                grids=tuple(grids[key] for key in mine),
                costs=tuple(costs[key] for key in mine),
                encoders=tuple(encoders[key] - first for key in mine),
                rounds=tuple(rounds[key] for key in mine),
                num_rounds=1 + max((rounds[key] for key in (keys if across else mine)), default=-1),
                shown_by=tuple(tuple(shown_by[key]) if across else (0,) for key in mine),
                across=across,
                slots=slots,
            )
        )
    return plans


def _rounds(
    encoders: Mapping[str, int], patches: Mapping[str, int], most: int | None
) -> dict[str, int]:
    """Return the round in which each image is encoded by its rank."""
    rounds: dict[str, int] = {}
    last: dict[int, tuple[int, int]] = {}  # rank -> its last round, and the patches in it
    for key, encoder in encoders.items():
        number, held = last.get(encoder, (0, 0))
        if held and most is not None and held + patches[key] > most:
            number, held = number + 1, 0
        rounds[key], last[encoder] = number, (number, held + patches[key])
    return rounds
