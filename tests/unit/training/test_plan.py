"""Who trains on what: every target once, images only where they are shown, and as many packs as a
layout needs.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megavlm.data.packing import Tree
from megavlm.training.batch import PackShape, RankBatch, by_rank, plan_step
from tests.unit.training.trees import IMAGE, image, tree

MINIBATCHES = [
    [tree(4, [3, 2], "a"), tree(4, [1, 5], "b"), tree(4, [2], "a")],
    [tree(4, [7, 1, 1], "c"), tree(4, [2, 2], "b"), tree(4, [4], "d")],
]
IMAGES = {key: image(key) for key in "abcd"}


def plan(num_ranks: int, minibatches: Any = MINIBATCHES, **shape: Any) -> list[RankBatch]:
    return plan_step(
        minibatches,
        IMAGES,
        num_ranks=num_ranks,
        shape=PackShape(**{"max_tokens": 16, "vision_token_ids": (IMAGE,), **shape}),
        cost=lambda tree: float(tree.num_tokens),
    )


def num_targets(trees: list[Tree]) -> int:
    return sum(len(s.token_ids) for tree in trees for s in tree.segments if s.is_target)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_target_once_and_images_where_they_are_shown(num_ranks: int) -> None:
    rank_batches = plan(num_ranks, multiple=4)
    assert len(rank_batches) == num_ranks
    for index, trees in enumerate(MINIBATCHES):
        here = [batch.minibatches[index] for batch in rank_batches]
        assert all(batch.num_targets[index] == num_targets(trees) for batch in rank_batches)
        packs = [pack for minibatch in here for pack in minibatch]
        assert sum(pack.num_targets for pack in packs) == num_targets(trees)
        assert all(here), "the reductions are collective"
        assert all(len(pack.token_ids) % 4 == 0 for pack in packs)
    for batch in rank_batches:
        shown = {key for pack in batch.packs for key in pack.images}
        assert set(batch.images) == shown
        assert batch.num_tokens == sum(t.num_tokens for m in MINIBATCHES for t in m)


def counts(rank_batches: list[RankBatch]) -> list[list[int]]:
    """Packs of each minibatch, by rank."""
    return [[len(packs) for packs in batch.minibatches] for batch in rank_batches]


# One rank gets the long tree, another three short ones in two packs.
UNEVEN = [[tree(4, [12], "a"), tree(4, [4], "b"), tree(4, [4], "c"), tree(4, [3], "d")]]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({}, [[1], [2]]),
        ({"count": 2}, [[2], [2]]),
        ({"count": 3}, [[3], [3]]),
        ({"equal_counts": True}, [[2], [2]]),
        ({"equal_counts": True, "count": 3}, [[3], [3]]),
        ({"count": 4, "equal_counts": True}, [[4], [4]]),
    ],
)
def test_packs_of_padding_fill_up(shape: dict[str, Any], expected: list[list[int]]) -> None:
    """Virtual stages take turns in rounds of `count`; ranks that share experts need as many."""
    rank_batches = plan(2, UNEVEN, **shape)
    assert sorted(counts(rank_batches)) == expected
    for batch in rank_batches:
        (packs,) = batch.minibatches
        assert batch.num_targets == [num_targets(UNEVEN[0])]
        real = [pack for pack in packs if pack.num_targets]
        padding = packs[len(real) :]
        assert real == packs[: len(real)]
        for pack in padding:
            assert pack.columns is not None and real[0].columns is not None
            assert pack.columns.present().keys() == real[0].columns.present().keys()
            assert len(pack.columns.rewards) == 0
            assert not pack.images and len(pack.token_ids) > 0


def test_a_minibatch_with_less_trees_than_ranks_has_packs_on_all() -> None:
    rank_batches = plan(3, [[tree(4, [3], "a")]], multiple=2, context_size=2)
    assert counts(rank_batches) == [[1], [1], [1]]
    for batch in rank_batches:
        (pack,) = batch.minibatches[0]
        assert len(pack.token_ids) % 4 == 0
        for rank in range(2):
            part = batch.part(rank, torch.device("cpu")).minibatches[0][0]
            assert len(part.token_ids) == len(pack.token_ids) // 2 > 0


@pytest.mark.parametrize("context_size", [2, 3])
def test_context_ranks_have_parts_of_the_same_packs(context_size: int) -> None:
    for batch in plan(2, multiple=2, context_size=context_size):
        parts = [batch.part(rank, torch.device("cpu")) for rank in range(context_size)]
        assert all(part.images == batch.images for part in parts)
        assert all(part.num_targets == batch.num_targets for part in parts)
        for index, minibatch in enumerate(batch.minibatches):
            mine = [part.minibatches[index] for part in parts]
            for whole, *held in zip(minibatch, *mine, strict=True):
                sizes = {len(part.token_ids) for part in held}
                assert len(sizes) == 1 and sizes.pop() % 2 == 0
                tokens = torch.cat([part.token_index for part in held]).sort().values
                assert torch.equal(tokens, torch.arange(len(whole.token_ids)))
                targets = torch.cat([part.target_index for part in held]).sort().values
                assert torch.equal(targets, torch.arange(whole.num_targets))
                for part in held:
                    assert part.columns is not None and whole.columns is not None
                    expected = whole.columns.rewards[part.target_index]
                    assert torch.equal(part.columns.rewards, expected)


def test_a_part_has_columns_of_its_own() -> None:
    """Log-probs that a pass adds to the parts are not in the plan."""
    (batch,) = plan(1)
    part = batch.part(0, torch.device("cpu"))
    part.minibatches[0][0].columns = None
    assert batch.minibatches[0][0].columns is not None


def test_images_go_to_the_first_stage_only() -> None:
    """Two stages of two data ranks of two tensor ranks."""
    mesh: Any = SimpleNamespace(
        data_ranks=(0, 0, 1, 1, 0, 0, 1, 1), pipeline_ranks=(0, 0, 0, 0, 1, 1, 1, 1)
    )
    rank_batches = plan(2)
    ranks = by_rank(rank_batches, mesh)
    assert [rank.minibatches for rank in ranks] == [
        rank_batches[i].minibatches for i in mesh.data_ranks
    ]
    assert [rank.images for rank in ranks[:4]] == [rank_batches[i].images for i in (0, 0, 1, 1)]
    assert all(rank_batches[i].images for i in (0, 1))
    assert all(rank.images == {} for rank in ranks[4:])
