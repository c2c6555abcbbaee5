"""Who trains on what: every target once, as many packs as a layout needs, and each image encoded by
one rank.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.arrays import from_bytes
from megavlm.data.packs.packing import Pack, make_pack
from megavlm.data.packs.trees import Tree
from megavlm.training.step.image_plan import ImagePlan, assign_encoders, plan_images
from megavlm.training.step.pack_plan import Schedule
from megavlm.training.step.rank_batch import RankBatch, unpack_part
from megavlm.training.step.step_plan import PackShape, StepPlan, plan_step, shown_images
from tests.support.trees import IMAGE, hello, image, tree

MINIBATCHES = [
    [tree(4, [3, 2], "a"), tree(4, [1, 5], "b"), tree(4, [2], "a")],
    [tree(4, [7, 1, 1], "c"), tree(4, [2, 2], "b"), tree(4, [4], "d")],
]
IMAGES = {key: image(key) for key in "abcd"}
GRIDS = {key: image.grids for key, image in IMAGES.items()}
COSTS = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0}


def plan(
    num_ranks: int,
    minibatches: Any = MINIBATCHES,
    *,
    slots: int = 1,
    tower_trained: bool = False,
    schedule: Schedule | None = None,
    max_tokens: int = 16,
    **shape: Any,
) -> StepPlan:
    ranks = plan_step(
        minibatches,
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        schedule=schedule or Schedule(),
        cost=lambda tree: [float(len(segment.token_ids)) for segment in tree.segments],
    )
    shown = [shown_images(minibatches) for minibatches in ranks]
    return StepPlan(
        minibatches=ranks,
        images=plan_images(shown, GRIDS, COSTS, slots=slots),
        sources=IMAGES,
        num_tokens=sum(tree.num_tokens for trees in minibatches for tree in trees),
        tower_trained=tower_trained,
        shape=PackShape(vision_token_ids=(IMAGE,), **shape),
    )


def packs_of(plan: StepPlan, context_rank: int = 0) -> list[list[list[Pack]]]:
    """Packs of each data rank and minibatch, as a context rank makes them of what it receives."""
    parts = [plan.part(data_rank) for data_rank in range(len(plan.minibatches))]
    return [unpack_part(part, context_rank, torch.device("cpu"))[0] for part in parts]


def num_targets(trees: list[Tree]) -> int:
    return sum(len(s.token_ids) for tree in trees for s in tree.segments if s.is_target)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_target_once(num_ranks: int) -> None:
    planned = plan(num_ranks, multiple=4)
    ranks = packs_of(planned)
    assert len(ranks) == num_ranks
    for index, trees in enumerate(MINIBATCHES):
        packs = [pack for minibatches in ranks for pack in minibatches[index]]
        assert sum(pack.num_targets for pack in packs) == num_targets(trees)
        assert all(minibatches[index] for minibatches in ranks), "the reductions are collective"
        assert all(len(pack.token_ids) % 4 == 0 for pack in packs)
    for data_rank, minibatches in enumerate(ranks):
        shown = {key for packs in minibatches for pack in packs for key in pack.images}
        assert set(planned.images[data_rank].keys) == shown
        _, header = from_bytes(planned.part(data_rank))
        assert header["num_targets"] == [num_targets(trees) for trees in MINIBATCHES]
        assert header["num_tokens"] == sum(t.num_tokens for m in MINIBATCHES for t in m)


def test_trees_are_the_same_after_their_journey() -> None:
    (minibatches,) = packs_of(plan(1))
    planned = plan(1)
    for packs, trees in zip(minibatches, planned.minibatches[0], strict=True):
        for pack, its_trees in zip(packs, trees, strict=True):
            expected = make_pack(its_trees, **asdict(planned.shape))
            assert pack.images == expected.images and pack.parents == expected.parents
            for name, value in vars(expected).items():
                if isinstance(value, torch.Tensor):
                    found = getattr(pack, name)
                    assert torch.equal(found, value) and found.dtype == value.dtype, name
            assert pack.columns is not None and expected.columns is not None
            for name, column in expected.columns.present().items():
                found = getattr(pack.columns, name)
                assert torch.equal(found, column) and found.dtype == column.dtype, name


def test_the_examples_of_a_plan_and_a_rank_batch_are_true() -> None:
    planned = plan(2, [[hello()]], max_tokens=6)
    assert f"num_tokens: {planned.num_tokens}\n" in str(StepPlan.__doc__)
    for data_rank, ((pack,),) in enumerate(packs_of(planned)):
        shown = f"tokens of data rank {data_rank}: {pack.token_ids.tolist()}\n"
        assert shown in str(StepPlan.__doc__)
    ((packs,), _, values) = unpack_part(planned.part(0), 0, torch.device("cpu"))
    values["minibatches[0][0].token_ids"] = packs[0].token_ids.tolist()
    shown = re.findall(r"^ {8}(\S+): (.+)$", str(RankBatch.__doc__), re.M)
    assert len(shown) == 3 and all(values[name] == json.loads(value) for name, value in shown)


def test_no_bytes_per_token_but_numbers() -> None:
    """A thousand times the tokens: the values are as long, and the arrays are as many."""
    short, long = ([[tree(4, [size] * 4, "a")]] for size in (1, 1000))
    parts = [plan(1, trees, max_tokens=10**6).part(0) for trees in (short, long)]
    (few, _), (many, _) = map(from_bytes, parts)
    assert len(few) == len(many)
    added = len(parts[1]) - len(parts[0])
    assert added / (4 * 999) < 4 + 2 * 4 + 1, "id, reward and log-prob of a token"


def counts(planned: StepPlan) -> list[list[int]]:
    """Packs of each minibatch, by rank."""
    return [[len(packs) for packs in minibatches] for minibatches in packs_of(planned)]


# Packs of 16 hold one tree each.
THREE = [[tree(4, [12], "a"), tree(4, [12], "b"), tree(4, [12], "c")]]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), [[1], [2]]),
        (Schedule(count=2, bubble=0.5), [[2], [2]]),
        (Schedule(count=3, bubble=0.5), [[3], [3]]),
        (Schedule(lockstep=True), [[2], [2]]),
        (Schedule(lockstep=True, count=3, bubble=0.5), [[3], [3]]),
        (Schedule(count=4, lockstep=True, bubble=0.5), [[4], [4]]),
    ],
)
def test_packs_of_padding_fill_up(schedule: Schedule, expected: list[list[int]]) -> None:
    """Virtual stages take turns in rounds of `count`; ranks that share experts need as many."""
    planned = plan(2, THREE, schedule=schedule)
    assert sorted(counts(planned)) == expected
    for (packs,) in packs_of(planned):
        real = [pack for pack in packs if pack.num_targets]
        assert real == packs[: len(real)]
        for pack in packs[len(real) :]:
            assert pack.columns is not None and real[0].columns is not None
            assert pack.columns.present().keys() == real[0].columns.present().keys()
            for name, column in pack.columns.present().items():
                assert column.shape == (0,) and column.dtype == getattr(real[0].columns, name).dtype
            assert not pack.images and len(pack.token_ids) > 0


def test_a_group_in_several_packs_has_its_prompt_and_image_in_each() -> None:
    whole = [[tree(4, [6, 6, 6, 6], "a")]]
    planned = plan(2, whole)
    for data_rank, ((pack,),) in enumerate(packs_of(planned)):
        _, header = from_bytes(planned.part(data_rank))
        assert header["num_tokens"] == 28, "without repeated prompts"
        assert header["num_targets"] == [24]
        assert pack.images == ("a",) and pack.num_targets == 12 and pack.num_tokens == 16
    encoders = [encoder for images in planned.images for encoder in images.encoders]
    assert len(set(encoders)) == 1, "its image is encoded once"


def test_a_minibatch_with_less_branches_than_ranks_has_packs_on_all() -> None:
    planned = plan(3, [[tree(4, [3], "a")]], multiple=2, context_size=2)
    assert counts(planned) == [[1], [1], [1]]
    for first, second in zip(packs_of(planned, 0), packs_of(planned, 1), strict=True):
        assert len(first[0][0].token_ids) == len(second[0][0].token_ids) > 0
        assert len(first[0][0].token_ids) % 2 == 0
        assert first[0][0].columns is not None


@pytest.mark.parametrize("context_size", [2, 3])
def test_context_ranks_have_parts_of_the_same_packs(context_size: int) -> None:
    planned = plan(2, multiple=2, context_size=context_size)
    parts = [packs_of(planned, rank) for rank in range(context_size)]
    for data_rank, minibatches in enumerate(planned.minibatches):
        for index, packs in enumerate(minibatches):
            mine = [part[data_rank][index] for part in parts]
            for trees, *held in zip(packs, *mine, strict=True):
                whole = make_pack(trees, **asdict(planned.shape))
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


@given(st.lists(st.floats(1, 100), max_size=20), st.integers(1, 5))
def test_shares_of_images_balance(costs: list[float], num_ranks: int) -> None:
    encoders = assign_encoders(costs, [range(num_ranks)] * len(costs))
    loads = [
        sum(cost for cost, encoder in zip(costs, encoders, strict=True) if encoder == rank)
        for rank in range(num_ranks)
    ]
    assert max(loads) - min(loads) <= max(costs, default=0) + 1e-9


def encoded(planned: StepPlan, slots: int) -> list[list[str]]:
    """Keys of what each rank of the first stage is sent."""
    ranks = range(len(planned.minibatches) * slots)
    return [sorted(planned.sources_of(*divmod(rank, slots))) for rank in ranks]


@pytest.mark.parametrize(("num_ranks", "slots"), [(1, 1), (1, 4), (2, 1), (2, 2), (3, 2)])
def test_an_image_is_sent_to_one_rank_that_encodes_it(num_ranks: int, slots: int) -> None:
    """Several data ranks show a and b."""
    planned = plan(num_ranks, slots=slots)
    sent = encoded(planned, slots)
    assert sorted(key for keys in sent for key in keys) == ["a", "b", "c", "d"]
    for data_rank, images in enumerate(planned.images):
        check_receivers(planned.images, data_rank, images)


def check_receivers(plans: Sequence[ImagePlan], data_rank: int, mine: ImagePlan) -> None:
    """An image's features reach all ranks of all data ranks that show it, from one of these."""
    for index, key in enumerate(mine.keys):
        showing = [d for d, other in enumerate(plans) if key in other.keys]
        assert data_rank in showing
        if mine.across:
            assert mine.encoders[index] // mine.slots in showing
            expected = {d * mine.slots + slot for d in showing for slot in range(mine.slots)}
        else:
            assert showing == [data_rank]
            expected = set(range(mine.slots))
        assert mine.encoders[index] in expected
        assert mine.receivers(index) == expected


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_tower_that_learns_gets_the_images_of_each_pack(slots: int) -> None:
    planned = plan(2, slots=slots, tower_trained=True)
    sent = encoded(planned, slots)
    for data_rank, minibatches in enumerate(packs_of(planned)):
        images = planned.images[data_rank]
        for pack in (pack for packs in minibatches for pack in packs):
            indices = images.indices(pack.images)
            for slot, share in enumerate(images.shares_of(indices)):
                keys = {images.keys[indices[place]] for place in share}
                assert keys <= set(sent[data_rank * slots + slot])


@pytest.mark.parametrize("most", [1, 8, 40, None])
def test_rounds_bound_what_a_rank_encodes_at_once(most: int | None) -> None:
    """An image has 4 x 4 patches."""
    shown = [["a", "b"], ["b", "c", "d"], ["a"]]
    for slots in (1, 2):
        plans = plan_images(shown, GRIDS, COSTS, slots=slots, round_patches=most)
        count = {plan.num_rounds for plan in plans}
        assert len(count) == 1, "all take part in every round"
        found = {
            (key, e, r)
            for p in plans
            for key, e, r in zip(p.keys, p.encoders, p.rounds, strict=True)
        }
        assert len(found) == 4
        at_once = Counter((encoder, number) for _, encoder, number in found)
        assert max(at_once.values()) <= max(1, (most or 64) // 16)
        assert max(number for *_, number in found) == count.pop() - 1


def test_data_ranks_without_common_images_encode_by_themselves() -> None:
    """Ranks are then numbered within a data rank, and each has rounds of its own."""
    shown = [["a"], ["b", "c", "d"], []]
    plans = plan_images(shown, GRIDS, COSTS, slots=2, round_patches=1)
    assert [plan.keys for plan in plans] == [("a",), ("b", "c", "d"), ()]
    assert [plan.encoders for plan in plans] == [(0,), (0, 1, 1), ()]
    assert [plan.num_rounds for plan in plans] == [1, 2, 0]
    for data_rank, plan in enumerate(plans):
        assert not plan.across
        assert all(plan.receivers(index) == {0, 1} for index in range(len(plan.keys)))
        held = [plan.held_by(data_rank, slot, None) for slot in range(2)]
        assert sorted(held[0] + held[1]) == list(range(len(plan.keys)))


def test_a_shared_image_is_encoded_where_there_is_least_to_do() -> None:
    plans = plan_images([["a", "b"], ["b"]], GRIDS, COSTS, slots=1)
    assert plans[1].encoders == (1,) and plans[0].encoders == (0, 1)
