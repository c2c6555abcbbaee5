"""Distribution of trees over data-parallel ranks and packs, balanced by modelled cost."""

import heapq
from collections.abc import Callable, Sequence

from megavlm.data.packing import Tree, pack_trees


def assign(
    trees: Sequence[Tree],
    num_ranks: int,
    max_tokens: int,
    cost: Callable[[Tree], float],
) -> list[list[list[Tree]]]:
    """Assign trees to packs of at most max_tokens on each rank.

    cost: modelled FLOPs of a tree, above 0. The ranks' sums are balanced; every rank has a tree if
    there are as many trees as ranks. Deterministic. Returns trees as [rank][pack][tree].

    Raises ValueError for a tree that is larger than a pack.
    """
    shares = partition([cost(tree) for tree in trees], num_ranks)
    return [pack_trees([trees[index] for index in share], max_tokens) for share in shares]


def partition(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Partition `costs`, all above 0, into num_parts lists of indices whose sums are close.

    The largest differencing method of Karmarkar and Karp: the two partitions whose parts differ
    most are merged, the heaviest part of each with the lightest of the other. An empty part is a
    lightest one, so none stays empty if there are enough costs.
    """
    # (-difference, first index to break ties, parts as (sum, indices), heaviest first)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = [
        (-cost, index, [(cost, [index]), *((0.0, []) for _ in range(num_parts - 1))])
        for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, heavy), (_, second, light) = heapq.heappop(heap), heapq.heappop(heap)
        parts = sorted(
            (
                (a + b, indices + others)
                for (a, indices), (b, others) in zip(heavy, reversed(light), strict=True)
            ),
            key=lambda part: -part[0],
        )
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], min(first, second), parts))
    if not heap:
        return [[] for _ in range(num_parts)]
    return [sorted(indices) for _, indices in heap[0][2]]
