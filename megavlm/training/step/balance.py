"""Distribution of items (trees or parts of trees) over ranks or packs, so that the costs are
similar.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from megavlm.data.packs.trees import Tree

# The costliest part may be this much above the mean before prompts are repeated to even it out.
SLACK = 0.01
SWAP_SLACK = SLACK / 5  # the same for exchanges of whole items, which repeat no prompt
PARTNERS = 32  # about twice this many parts at most are compared with the costliest one


class Item(NamedTuple):
    """Tree `tree` with some of its branches; it becomes a separate tree in its pack."""

    tree: int
    branches: tuple[int, ...]
    tokens: int
    cost: float


@dataclass(frozen=True)
class TreeSize:
    """Tokens and cost of a tree's root, the segments that every part of it has, and of each branch.
    A segment of some branches, but not of all, counts in each of them.
    """

    root_tokens: int
    root_cost: float
    tokens: tuple[int, ...]
    costs: tuple[float, ...]

    @classmethod
    def of(cls, tree: Tree, costs: Sequence[float]) -> "TreeSize":
        """Return the sizes of a tree. costs: Cost of each segment."""
        lengths = [len(segment.token_ids) for segment in tree.segments]
        branches, shared = tree.branches(), tree.shared
        return cls(
            sum(lengths[i] for i in shared),
            sum(costs[i] for i in shared),
            tuple(sum(lengths[i] for i in branch) for branch in branches),
            tuple(sum(costs[i] for i in branch) for branch in branches),
        )

    @property
    def cost(self) -> float:
        return self.root_cost + sum(self.costs)

    @property
    def longest(self) -> int:
        """Return the token count of the root with the longest branch."""
        return self.root_tokens + max(self.tokens, default=0)

    def item(self, tree: int, branches: Sequence[int]) -> Item:
        """Return the item of the root with these branches."""
        return Item(
            tree,
            tuple(sorted(branches)),
            self.root_tokens + sum(self.tokens[i] for i in branches),
            self.root_cost + sum(self.costs[i] for i in branches),
        )

    def cut(self, tree: int, max_tokens: int) -> list[Item]:
        """Cut the tree into as few items of at most max_tokens as possible, of similar cost. A
        branch is never cut.
        """
        room = max(max_tokens, self.longest) - self.root_tokens
        least, most = -(-sum(self.tokens) // max(room, 1)), len(self.tokens)
        if least <= 1:
            return [self.item(tree, range(most))]
        branches = [Item(tree, (i,), self.tokens[i], self.costs[i]) for i in range(most)]
        for count in range(least, most):
            if (parts := _spread(branches, count, room)) is not None:
                return [self.item(tree, [x.branches[0] for x in part]) for part in parts]
        return [self.item(tree, x.branches) for x in branches]


def balance(
    items: Sequence[Item], sizes: Sequence[TreeSize], num_parts: int, max_tokens: float
) -> list[list[Item]] | None:
    """Distribute items over parts of at most max_tokens so that the costliest part is cheap. Items
    are cut again if that helps. Returns None if the items do not fit.
    """
    spread = _spread(items, num_parts, max_tokens)
    if spread is None:
        return None
    parts = [_Part(part) for part in spread]
    while _improve(parts, partial(_swaps, max_tokens), SWAP_SLACK):
        pass
    while _improve(parts, partial(_cuts, max_tokens, sizes), SLACK):
        pass
    return [part.items for part in parts]


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


class _Part:
    """Items of one part, with the sums of their costs and tokens."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self._sum()

    def exchange(self, given: Item | None, taken: Item | None) -> None:
        """Replace one item by another; None stands for no item."""
        if given is not None:
            self.items.remove(given)
        if taken is not None:
            self.items.append(taken)
        self._sum()

    def _sum(self) -> None:
        self.cost = sum(item.cost for item in self.items)
        self.tokens = sum(item.tokens for item in self.items)


class _Exchange(NamedTuple):
    """An exchange between the costliest part and `partner`. In the costliest part `kept` replaces
    `given`; in the partner `sent` replaces `returned`. cost: Cost of the costlier part after the
    exchange.
    """

    cost: float
    partner: _Part
    given: Item
    kept: Item | None
    returned: Item | None
    sent: Item


def _improve(
    parts: Sequence[_Part], exchanges: Callable[[_Part, _Part], Iterator[_Exchange]], slack: float
) -> bool:
    """Make the costliest part cheaper by one exchange with another part. Returns False if it is
    balanced well enough or no exchange helps.
    """
    worst = max(parts, key=lambda part: part.cost)
    if worst.cost <= (1 + slack) * sum(part.cost for part in parts) / len(parts):
        return False
    others = sorted((part for part in parts if part is not worst), key=lambda part: part.cost)
    # The cheapest parts, and an even sample of the others.
    partners = others[:PARTNERS] + others[PARTNERS :: max(1, len(others) // PARTNERS)]
    found = (exchange for partner in partners for exchange in exchanges(worst, partner))
    best = min(found, key=lambda exchange: exchange.cost, default=None)
    # A minimum gain, so that repeated improvements come to an end.
    if best is None or best.cost >= worst.cost * (1 - 1e-4):
        return False
    worst.exchange(best.given, best.kept)
    best.partner.exchange(best.returned, best.sent)
    return True


def _swaps(max_tokens: float, worst: _Part, partner: _Part) -> Iterator[_Exchange]:
    """Yield moves of whole items from part `worst` to `partner`, and swaps for cheaper items."""
    for given in worst.items:
        for taken in (None, *partner.items):
            less = given.cost - (taken.cost if taken else 0.0)
            fewer = given.tokens - (taken.tokens if taken else 0)
            fits = worst.tokens - fewer <= max_tokens and partner.tokens + fewer <= max_tokens
            if less > 0 and fits:
                cost = max(worst.cost - less, partner.cost + less)
                yield _Exchange(cost, partner, given, taken, taken, given)


def _cuts(
    max_tokens: float, sizes: Sequence[TreeSize], worst: _Part, partner: _Part
) -> Iterator[_Exchange]:
    """Yield moves of some branches of an item to `partner`; both parts then have the item's
    root.
    """
    for given in worst.items:
        size = sizes[given.tree]
        wanted = (worst.cost - partner.cost - size.root_cost) / 2
        chosen: list[int] = []
        for branch in sorted(given.branches, key=lambda i: -size.costs[i]):
            if size.costs[branch] <= wanted:
                chosen.append(branch)
                wanted -= size.costs[branch]
        if not chosen or len(chosen) == len(given.branches):
            continue
        kept = size.item(given.tree, [i for i in given.branches if i not in chosen])
        sent = size.item(given.tree, chosen)
        if partner.tokens + sent.tokens <= max_tokens:
            cost = max(worst.cost - given.cost + kept.cost, partner.cost + sent.cost)
            yield _Exchange(cost, partner, given, kept, None, sent)


def best_fit(items: Sequence[Item], sizes: Sequence[TreeSize], max_tokens: int) -> list[list[Item]]:
    """Distribute items over few packs of at most max_tokens (best fit, largest first). Items of the
    same tree in one pack are merged.
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
    return [merged(pack, sizes) for pack in packs]


def merged(pack: list[Item], sizes: Sequence[TreeSize]) -> list[Item]:
    """Return a pack's items, with all items of a tree merged into one."""
    if len({item.tree for item in pack}) == len(pack):
        return pack
    branches: dict[int, list[int]] = {}
    for item in pack:
        branches.setdefault(item.tree, []).extend(item.branches)
    return [sizes[tree].item(tree, indices) for tree, indices in branches.items()]
