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
        here = [work.minibatches[index] for work in rank_batches]
        assert all(minibatch.num_targets == num_targets(trees) for minibatch in here)
        packs = [pack for minibatch in here for pack in minibatch.packs]
        assert sum(pack.num_targets for pack in packs) == num_targets(trees)
        assert all(minibatch.packs for minibatch in here), "the reductions are collective"
        assert all(len(pack.token_ids) % 4 == 0 for pack in packs)
    for work in rank_batches:
        shown = {key for m in work.minibatches for pack in m.packs for key in pack.images}
        assert set(work.images) == shown
        assert all(p.png == b"" for p in work.images.values()), "only the servers need the file"
        assert work.num_tokens_everywhere == sum(t.num_tokens for m in MINIBATCHES for t in m)


def counts(rank_batches: list[RankBatch]) -> list[list[int]]:
    """Packs of each minibatch, by rank."""
    return [[len(minibatch.packs) for minibatch in work.minibatches] for work in rank_batches]


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
    for work in rank_batches:
        (minibatch,) = work.minibatches
        assert minibatch.num_targets == num_targets(UNEVEN[0])
        real = [pack for pack in minibatch.packs if pack.num_targets]
        padding = minibatch.packs[len(real) :]
        assert real == minibatch.packs[: len(real)]
        for pack in padding:
            assert pack.columns is not None and real[0].columns is not None
            assert pack.columns.present().keys() == real[0].columns.present().keys()
            assert len(pack.columns.rewards) == 0
            assert not pack.images and len(pack.token_ids) > 0


def test_a_minibatch_with_less_trees_than_ranks_has_packs_on_all() -> None:
    rank_batches = plan(3, [[tree(4, [3], "a")]], multiple=2, context_size=2)
    assert counts(rank_batches) == [[1], [1], [1]]
    for work in rank_batches:
        (pack,) = work.minibatches[0].packs
        assert len(pack.token_ids) % 4 == 0
        for rank in range(2):
            part = work.part(rank, torch.device("cpu")).minibatches[0].packs[0]
            assert len(part.token_ids) == len(pack.token_ids) // 2 > 0


@pytest.mark.parametrize("context_size", [2, 3])
def test_context_ranks_have_parts_of_the_same_packs(context_size: int) -> None:
    for work in plan(2, multiple=2, context_size=context_size):
        parts = [work.part(rank, torch.device("cpu")) for rank in range(context_size)]
        assert all(part.images == work.images for part in parts)
        for index, minibatch in enumerate(work.minibatches):
            mine = [part.minibatches[index] for part in parts]
            assert all(part.num_targets == minibatch.num_targets for part in mine)
            for whole, *held in zip(minibatch.packs, *(m.packs for m in mine), strict=True):
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
    (work,) = plan(1)
    part = work.part(0, torch.device("cpu"))
    part.minibatches[0].packs[0].columns = None
    assert work.minibatches[0].packs[0].columns is not None


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
