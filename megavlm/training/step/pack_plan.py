"""Plan of packs: assigns trees to data-parallel ranks and packs, and minimizes the modelled time of
the slowest rank.

A tree may be cut between its episodes. Each part then repeats the prompt and computes its tokens
again. So a tree is cut only if it exceeds a pack, if ranks would otherwise wait for one
another, or if more packs shorten a pipeline's bubble by more than the repeated prompts cost.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megavlm.data.packs.trees import Tree
from megavlm.training.step.balance import Item, TreeSize, balance, best_fit, merged

SegmentCosts = Callable[[Tree], Sequence[float]]
SIZES = 16  # pack sizes that are tried; then this many again near the best


@dataclass(frozen=True)
class Schedule:
    """How a parallel layout runs the packs of its data ranks.

    bubble: Pipeline bubble, (stages - 1) / virtual stages (arXiv 2104.04473). A rank takes the sum
    of its packs' times plus `bubble` times the longest.

    lockstep: True if ranks share experts. All ranks then run the same number of packs, and each
    pack takes as long as the longest of its turn.

    count: The number of packs must be a multiple of it.

    least_cost: Minimum cost of a pack, however few tokens it has.
    """

    bubble: float = 0.0
    lockstep: bool = False
    count: int = 1
    least_cost: float = 0.0

    def time(self, ranks: Sequence[Sequence[float]]) -> float:
        """Return the time of the slowest rank, in the unit of costs. ranks: Cost of each pack of
        each rank.
        """
        if not self.lockstep:
            return max(self._time(packs) for packs in ranks)
        turns = max(map(len, ranks))
        return self._time(
            [max(packs[i] for packs in ranks if i < len(packs)) for i in range(turns)]
        )

    def _time(self, packs: Sequence[float]) -> float:
        costs = [max(cost, self.least_cost) for cost in packs]
        costs += [self.least_cost] * (-len(packs) % self.count)
        return sum(costs) + self.bubble * max(costs, default=0.0)


def assign(
    trees: Sequence[Tree],
    num_ranks: int,
    max_tokens: int,
    cost: SegmentCosts,
    schedule: Schedule | None = None,
) -> list[list[list[Tree]]]:
    """Assign trees, whole or cut, to packs of at most max_tokens on each rank.

    cost: Function that returns the modelled FLOPs of each segment of a tree, all above 0. Every
    rank gets a tree if there are at least as many branches as ranks. Deterministic. Returns trees
    as [rank][pack][tree].

    Raises ValueError if a prompt with one response does not fit a pack.
    """
    sizes = [TreeSize.of(tree, cost(tree)) for tree in trees]
    if (longest := max((size.longest for size in sizes), default=0)) > max_tokens:
        raise ValueError(
            f"data.pack_tokens: {max_tokens} is too small for a prompt with one response, "
            f"{longest} tokens; raise it, or lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
    plan = plan_packs(sizes, num_ranks, max_tokens, schedule or Schedule())
    return [
        [[trees[item.tree].part(item.branches) for item in pack] for pack in packs]
        for packs in plan
    ]


def plan_packs(
    sizes: Sequence[TreeSize], num_ranks: int, max_tokens: int, schedule: Schedule
) -> list[list[list[Item]]]:
    """Return the items of each pack of each rank."""
    if not sizes:
        return [[] for _ in range(num_ranks)]
    if schedule.bubble:
        return _by_size(sizes, num_ranks, max_tokens, schedule)
    items = [item for i, size in enumerate(sizes) for item in size.cut(i, max_tokens)]
    if schedule.lockstep:
        return _in_turns(items, sizes, num_ranks, max_tokens)
    # Only each rank's total counts, so each rank gets as few packs as possible.
    shares = balance(items, sizes, num_ranks, math.inf)
    assert shares is not None, "without a limit of tokens everything fits"
    return [best_fit(share, sizes, max_tokens) for share in shares]


def _by_size(
    sizes: Sequence[TreeSize], num_ranks: int, max_tokens: int, schedule: Schedule
) -> list[list[list[Item]]]:
    """Try several pack sizes and return the fastest plan. Smaller packs shorten the pipeline bubble
    but repeat more prompts.
    """
    plans: dict[int, list[list[list[Item]]]] = {}

    def time(limit: int) -> float:
        if limit not in plans:
            items = [item for i, size in enumerate(sizes) for item in size.cut(i, limit)]
            largest = max(limit, *(item.tokens for item in items))  # a long branch is not cut
            plans[limit] = _deal(best_fit(items, sizes, largest), num_ranks)
        return schedule.time(costs_of(plans[limit]))

    tokens = sum(size.root_tokens + sum(size.tokens) for size in sizes)
    least = min(max_tokens, -(-tokens // sum(max(len(size.tokens), 1) for size in sizes)))
    ratio = least / max_tokens
    limits = [round(max_tokens * ratio ** (i / SIZES)) for i in range(SIZES + 1)]
    near = limits.index(min(limits, key=time))
    low, high = limits[min(near + 1, SIZES)], limits[max(near - 1, 0)]
    return plans[min((*limits, *range(low, high, max(1, (high - low) // SIZES))), key=time)]


def _in_turns(
    items: Sequence[Item], sizes: Sequence[TreeSize], num_ranks: int, max_tokens: int
) -> list[list[list[Item]]]:
    """Return packs of similar cost, with as few packs per rank as hold the items."""
    turns = -(-sum(item.tokens for item in items) // (num_ranks * max_tokens))
    while (packs := balance(items, sizes, num_ranks * turns, max_tokens)) is None:
        turns += 1
    return _deal([merged(pack, sizes) for pack in packs], num_ranks)


def costs_of(plan: Sequence[Sequence[Sequence[Item]]]) -> list[list[float]]:
    """Return the cost of each pack of each rank."""
    return [[sum(item.cost for item in pack) for pack in packs] for packs in plan]


def _deal(packs: Sequence[list[Item]], num_ranks: int) -> list[list[list[Item]]]:
    """Deal packs to ranks in rounds of similar cost. The order alternates between rounds, so that
    the ranks' totals are close, too.
    """
    filled = [pack for pack in packs if pack]
    filled.sort(key=lambda pack: -sum(item.cost for item in pack))
    ranks: list[list[list[Item]]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(filled), num_ranks):
        for rank, pack in enumerate(filled[start : start + num_ranks]):
            ranks[rank if start // num_ranks % 2 == 0 else -1 - rank].append(pack)
    return ranks
