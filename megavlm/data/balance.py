"""Distribution of trees over data-parallel ranks and packs, by the modelled time of the slowest
rank.

A tree may be cut below its root, the prompt: each part repeats the prompt, which costs its tokens
again. So a tree is cut only where it exceeds a pack, where ranks would otherwise wait for one
another, or where more packs shorten a pipeline's bubble by more than the prompts cost.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from megavlm.data.packing import Tree

SegmentCosts = Callable[[Tree], Sequence[float]]
# The slowest part may be this much above the mean before prompts are repeated to even it out.
SLACK = 0.01
PARTNERS = 32  # parts that the costliest one is compared with, of many
SIZES = 16  # sizes of packs that are tried, and then of those near the best


@dataclass(frozen=True)
class Schedule:
    """Order in which a layout runs the packs of its data ranks.

    bubble: a rank takes the sum of its packs' times and `bubble` times the longest: stages less one
    over virtual stages (arXiv 2104.04473). lockstep: ranks share experts, so that all run as many
    packs, each as long as the longest of its turn. count: packs are a multiple of it.
    least_cost: cost of a pack of few tokens.
    """

    bubble: float = 0.0
    lockstep: bool = False
    count: int = 1
    least_cost: float = 0.0

    def time(self, ranks: Sequence[Sequence[float]]) -> float:
        """Return the time of the slowest rank, in the unit of costs. ranks: cost of each pack."""
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


class Item(NamedTuple):
    """The root of tree `tree` with some of its branches: in a pack a tree of its own."""

    tree: int
    branches: tuple[int, ...]
    tokens: int
    cost: float


@dataclass(frozen=True)
class TreeSize:
    """Tokens and cost of a tree's root, and of each branch below it."""

    root_tokens: int
    root_cost: float
    tokens: tuple[int, ...]
    costs: tuple[float, ...]

    @classmethod
    def of(cls, tree: Tree, costs: Sequence[float]) -> "TreeSize":
        """Return the sizes of a tree. costs: of each segment."""
        lengths = [len(segment.token_ids) for segment in tree.segments]
        branches = tree.branches()
        return cls(
            lengths[0],
            costs[0],
            tuple(sum(lengths[i] for i in branch) for branch in branches),
            tuple(sum(costs[i] for i in branch) for branch in branches),
        )

    @property
    def cost(self) -> float:
        return self.root_cost + sum(self.costs)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest branch with the root."""
        return self.root_tokens + max(self.tokens, default=0)

    def item(self, tree: int, branches: Sequence[int]) -> Item:
        """Return these branches with the root."""
        return Item(
            tree,
            tuple(sorted(branches)),
            self.root_tokens + sum(self.tokens[i] for i in branches),
            self.root_cost + sum(self.costs[i] for i in branches),
        )

    def cut(self, tree: int, max_tokens: int) -> list[Item]:
        """Cut into as few items of similar cost as keep max_tokens. A branch is never cut."""
        room = max(max_tokens, self.longest) - self.root_tokens
        least, most = -(-sum(self.tokens) // max(room, 1)), len(self.tokens)
        if least <= 1:
            return [self.item(tree, range(most))]
        branches = [Item(tree, (i,), self.tokens[i], self.costs[i]) for i in range(most)]
        for count in range(least, most):
            if (parts := _spread(branches, count, room)) is not None:
                return [self.item(tree, [x.branches[0] for x in part]) for part in parts]
        return [self.item(tree, x.branches) for x in branches]


def assign(
    trees: Sequence[Tree],
    num_ranks: int,
    max_tokens: int,
    cost: SegmentCosts,
    schedule: Schedule | None = None,
) -> list[list[list[Tree]]]:
    """Assign trees, whole or cut, to packs of at most max_tokens on each rank.

    cost: modelled FLOPs of each segment of a tree, above 0. Every rank has a tree if there are as
    many branches as ranks. Deterministic. Returns trees as [rank][pack][tree].

    Raises ValueError for a prompt that does not fit a pack with one response.
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
    # Only the ranks' sums count: packs are as few as they can be.
    shares = balance(items, sizes, num_ranks, math.inf)
    assert shares is not None, "without a limit of tokens everything fits"
    return [best_fit(share, sizes, max_tokens) for share in shares]


def _by_size(
    sizes: Sequence[TreeSize], num_ranks: int, max_tokens: int, schedule: Schedule
) -> list[list[list[Item]]]:
    """Return the plan of the size of packs that takes the least time: smaller packs make shorter
    bubbles and repeat more prompts.
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
    """Return packs of similar cost, as few turns of them as hold the items."""
    turns = -(-sum(item.tokens for item in items) // (num_ranks * max_tokens))
    while (packs := balance(items, sizes, num_ranks * turns, max_tokens)) is None:
        turns += 1
    return _deal(packs, num_ranks)


def costs_of(plan: Sequence[Sequence[Sequence[Item]]]) -> list[list[float]]:
    """Return the cost of each pack of each rank."""
    return [[sum(item.cost for item in pack) for pack in packs] for packs in plan]


def balance(
    items: Sequence[Item], sizes: Sequence[TreeSize], num_parts: int, max_tokens: float
) -> list[list[Item]] | None:
    """Distribute items over parts of at most max_tokens so that the costliest part costs little,
    cutting further where it helps. Returns None if the items do not fit.
    """
    parts = _spread(items, num_parts, max_tokens)
    if parts is not None:
        for may_cut in (False, True):
            while _improve(parts, sizes, max_tokens, may_cut=may_cut):
                pass
    return parts


def _spread(items: Sequence[Item], num_parts: int, max_tokens: float) -> list[list[Item]] | None:
    """Give each item, the costliest first, to the cheapest part that has room."""
    parts: list[list[Item]] = [[] for _ in range(num_parts)]
    room = [max_tokens] * num_parts
    heap = [(0.0, part) for part in range(num_parts)]
    heapify(heap)
    for item in sorted(items, key=lambda item: -item.cost):
        full = []
        while heap and room[heap[0][1]] < item.tokens:
            full.append(heappop(heap))
        if not heap:
            return None
        load, part = heappop(heap)
        parts[part].append(item)
        room[part] -= item.tokens
        for entry in (*full, (load + item.cost, part)):
            heappush(heap, entry)
    return parts


class _Change(NamedTuple):
    """An exchange between the costliest part and part `partner`. given: the item that leaves;
    kept: its branches that stay; taken: what comes for it.
    """

    worst: float  # cost of the costlier of both parts afterwards
    partner: int
    given: Item
    kept: Item | None
    sent: Item
    taken: Item | None


def _improve(
    parts: list[list[Item]], sizes: Sequence[TreeSize], max_tokens: float, *, may_cut: bool
) -> bool:
    """Make the costliest part cheaper by one exchange with another. Returns False if there is no
    need or no way.
    """
    loads = [sum(item.cost for item in part) for part in parts]
    worst = max(range(len(parts)), key=loads.__getitem__)
    slack = SLACK if may_cut else SLACK / 5
    if loads[worst] <= (1 + slack) * sum(loads) / len(loads):
        return False
    order = sorted(range(len(parts)), key=loads.__getitem__)
    order.remove(worst)
    partners = order[:PARTNERS] + order[PARTNERS :: max(1, len(order) // PARTNERS)]
    best: _Change | None = None
    for partner in partners:
        found = _cuts if may_cut else _swaps
        for change in found(parts, sizes, loads, worst, partner, max_tokens):
            if best is None or change.worst < best.worst:
                best = change
    if best is None or best.worst >= loads[worst] * (1 - 1e-4):
        return False
    here, there = parts[worst], parts[best.partner]
    here.remove(best.given)
    here.extend(item for item in (best.kept, best.taken) if item is not None)
    if best.taken is not None:
        there.remove(best.taken)
    there.append(best.sent)
    return True


def _swaps(
    parts: Sequence[list[Item]],
    sizes: Sequence[TreeSize],
    loads: Sequence[float],
    worst: int,
    partner: int,
    max_tokens: float,
) -> Iterator[_Change]:
    """Yield moves of whole items from part `worst`, and swaps for cheaper ones."""
    high, low = loads[worst], loads[partner]
    here, there = (sum(item.tokens for item in parts[i]) for i in (worst, partner))
    for given in parts[worst]:
        for taken in (None, *parts[partner]):
            less = given.cost - (taken.cost if taken else 0.0)
            fewer = given.tokens - (taken.tokens if taken else 0)
            if less > 0 and here - fewer <= max_tokens and there + fewer <= max_tokens:
                yield _Change(max(high - less, low + less), partner, given, None, given, taken)


def _cuts(
    parts: Sequence[list[Item]],
    sizes: Sequence[TreeSize],
    loads: Sequence[float],
    worst: int,
    partner: int,
    max_tokens: float,
) -> Iterator[_Change]:
    """Yield moves of some branches of an item, with its root repeated."""
    high, low = loads[worst], loads[partner]
    there = sum(item.tokens for item in parts[partner])
    for given in parts[worst]:
        size = sizes[given.tree]
        wanted = (high - low - size.root_cost) / 2
        chosen: list[int] = []
        for branch in sorted(given.branches, key=lambda i: -size.costs[i]):
            if size.costs[branch] <= wanted:
                chosen.append(branch)
                wanted -= size.costs[branch]
        if not chosen or len(chosen) == len(given.branches):
            continue
        kept = size.item(given.tree, [i for i in given.branches if i not in chosen])
        sent = size.item(given.tree, chosen)
        if there + sent.tokens <= max_tokens:
            worse = max(high - given.cost + kept.cost, low + sent.cost)
            yield _Change(worse, partner, given, kept, sent, None)


def _deal(packs: Sequence[list[Item]], num_ranks: int) -> list[list[list[Item]]]:
    """Deal packs to ranks in rounds of similar cost, in alternating order, so that the ranks' sums
    are close, too.
    """
    filled = [pack for pack in packs if pack]
    filled.sort(key=lambda pack: -sum(item.cost for item in pack))
    ranks: list[list[list[Item]]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(filled), num_ranks):
        for rank, pack in enumerate(filled[start : start + num_ranks]):
            ranks[rank if start // num_ranks % 2 == 0 else -1 - rank].append(pack)
    return ranks


def best_fit(items: Sequence[Item], sizes: Sequence[TreeSize], max_tokens: int) -> list[list[Item]]:
    """Distribute items over few packs of at most max_tokens (best fit, largest first). Items of a
    tree become one where they are in one pack.
    """
    packs: list[list[Item]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for item in sorted(items, key=lambda item: -item.tokens):
        fit = bisect_left(room, (item.tokens, -1))
        if fit == len(room):
            left, pack = max_tokens, len(packs)
            packs.append([])
        else:
            left, pack = room.pop(fit)
        packs[pack].append(item)
        insort(room, (left - item.tokens, pack))
    return [_merged(pack, sizes) for pack in packs]


def _merged(pack: list[Item], sizes: Sequence[TreeSize]) -> list[Item]:
    if len({item.tree for item in pack}) == len(pack):
        return pack
    branches: dict[int, list[int]] = {}
    for item in pack:
        branches.setdefault(item.tree, []).extend(item.branches)
    return [sizes[tree].item(tree, indices) for tree, indices in branches.items()]
