"""Who trains on what: every target once, pictures only where they are shown, balanced by cost."""

from types import SimpleNamespace

import pytest
import torch

from megavlm.data.packing import Segment, Tree
from megavlm.data.pictures import Picture
from megavlm.data.positions import text_positions
from megavlm.training.cost import tree_cost
from megavlm.training.plan import plan_step

IMAGE = 9
CONFIG = SimpleNamespace(
    text_config=SimpleNamespace(hidden_size=8, intermediate_size=16, num_hidden_layers=2),
    vision_config=SimpleNamespace(hidden_size=4, intermediate_size=8, depth=3),
)


def segment(length: int, start: int, parent: int) -> Segment:
    ids = torch.full((length,), 1 if parent >= 0 else IMAGE)
    return Segment(ids, text_positions(length, start), parent, is_target=parent >= 0)


def tree(prompt: int, responses: list[int], picture: str) -> Tree:
    children = [segment(length, prompt, 0) for length in responses]
    return Tree((segment(prompt, 0, -1), *children), (picture,))


def picture(key: str, side: int = 4) -> Picture:
    return Picture(key, b"png", torch.zeros(side * side, 3), (1, side, side))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_target_once_and_pictures_where_they_are_shown(num_ranks: int) -> None:
    minibatches = [
        [tree(4, [3, 2], "a"), tree(4, [1, 5], "b"), tree(4, [2], "a")],
        [tree(4, [7, 1, 1], "c"), tree(4, [2, 2], "b"), tree(4, [4], "d")],
    ]
    pictures = {key: picture(key) for key in "abcd"}
    works = plan_step(
        minibatches,
        pictures,
        num_ranks=num_ranks,
        pack_tokens=16,
        image_token_id=IMAGE,
        multiple=4,
        cost=tree_cost(CONFIG, pictures),
    )
    assert len(works) == num_ranks
    for index, trees in enumerate(minibatches):
        targets = sum(len(s.token_ids) for t in trees for s in t.segments if s.is_target)
        here = [work.minibatches[index] for work in works]
        assert all(minibatch.num_targets == targets for minibatch in here)
        packs = [pack for minibatch in here for pack in minibatch.packs]
        assert sum(pack.num_targets for pack in packs) == targets
        assert all(minibatch.packs for minibatch in here), "the reductions are collective"
        assert all(len(pack.token_ids) % 4 == 0 for pack in packs)
    for work in works:
        shown = {key for m in work.minibatches for pack in m.packs for key in pack.pictures}
        assert set(work.pictures) == shown
        assert all(p.png == b"" for p in work.pictures.values()), "only the servers need the file"
        assert work.num_tokens_everywhere == sum(t.num_tokens for m in minibatches for t in m)


def test_cost_counts_the_prompt_once_and_the_tower() -> None:
    pictures = {"small": picture("small", 4), "large": picture("large", 16)}
    cost = tree_cost(CONFIG, pictures)
    one, two = cost(tree(10, [5], "small")), cost(tree(10, [5, 5], "small"))
    assert one < two < 2 * one
    assert cost(tree(10, [5], "large")) - one > 15 * 16 * 3 * 2 * (4 * 4**2 + 3 * 4 * 8)


def test_a_tree_of_turns_attends_its_ancestors() -> None:
    root, reply = segment(4, 0, -1), segment(3, 4, 0)
    turn = Segment(reply.token_ids, reply.positions, 1, is_target=True)
    pictures = {"a": picture("a")}
    cost = tree_cost(CONFIG, pictures)
    chain, fan = Tree((root, reply, turn), ("a",)), Tree((root, reply, reply), ("a",))
    extra_pairs = 3 * 3
    assert cost(chain) - cost(fan) == pytest.approx(extra_pairs * 4 * 8 * 2)
