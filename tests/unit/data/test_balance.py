"""Every tree goes to one rank, and the ranks' costs are close."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.data.balance import assign, partition
from megavlm.data.packing import Segment, Tree


def leaf(size: int) -> Tree:
    tokens = torch.ones(size, dtype=torch.long)
    return Tree((Segment(tokens, tokens.expand(3, -1), parent=-1, is_target=False),), ())


def quadratic(tree: Tree) -> float:
    return float(tree.num_tokens**2)


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(1, 6))
def test_every_tree_once_and_no_rank_without_work(sizes: list[int], num_ranks: int) -> None:
    trees = [leaf(size) for size in sizes]
    plan = assign(trees, num_ranks, 25, quadratic)
    assert len(plan) == num_ranks
    flat = [tree for rank in plan for pack in rank for tree in pack]
    assert sorted(map(id, flat)) == sorted(map(id, trees))
    assert all(sum(tree.num_tokens for tree in pack) <= 25 for rank in plan for pack in rank)
    assert sum(map(bool, plan)) == min(num_ranks, len(trees))
    assert assign(trees, num_ranks, 25, quadratic) == plan  # the same trees, by identity


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_close_to_the_best_partition(costs: list[int], num_parts: int) -> None:
    ours = max(sum(costs[index] for index in part) for part in partition(costs, num_parts))
    best = min(
        max(sum(c for c, p in zip(costs, places, strict=True) if p == part) for part in range(3))
        for places in itertools.product(range(num_parts), repeat=len(costs))
    )
    assert ours <= best * 4 / 3


@pytest.mark.parametrize(("num_trees", "num_ranks"), [(16, 2), (128, 8), (512, 32)])
def test_realistic_steps_are_balanced_to_three_percent(num_trees: int, num_ranks: int) -> None:
    rng = random.Random(0)
    trees = [leaf(int(min(4096, rng.lognormvariate(6.3, 0.6)))) for _ in range(num_trees)]
    plan = assign(trees, num_ranks, 4096, quadratic)
    costs = [sum(quadratic(tree) for pack in rank for tree in pack) for rank in plan]
    assert max(costs) <= 1.03 * sum(costs) / num_ranks


def test_cost_decides_not_length() -> None:
    trees = [leaf(size) for size in (4, 3, 2, 1)]
    heavy = {1: 100.0, 2: 1.0, 3: 1.0, 4: 1.0}
    (one, other) = assign(trees, 2, 10, lambda tree: heavy[tree.num_tokens])
    lengths = sorted([sorted(t.num_tokens for p in rank for t in p) for rank in (one, other)])
    assert lengths == [[1], [2, 3, 4]]


def test_a_tree_larger_than_a_pack_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"data\.pack_tokens"):
        assign([leaf(9)], 2, 8, quadratic)
