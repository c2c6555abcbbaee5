"""Packs equal a literal token-by-token reference, for random trees of any depth."""

import json
import random
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.data.packs.packing import Pack, join_targets, make_pack
from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.target_tokens import TargetColumns
from megavlm.data.packs.trees import Segment, Tree, prompt_tree
from tests.support.columns import columns
from tests.support.trees import empty_pack, hello

IMAGE, VIDEO = 98, 99
VISION = {IMAGE, VIDEO}


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    segments: list[Segment] = []
    owners: list[int | None] = []  # the sequence that a segment belongs to or continues
    parents = [draw(st.integers(0, i - 1)) if i else -1 for i in range(draw(st.integers(1, 6)))]
    for index, parent in enumerate(parents):
        size = draw(st.integers(1, 4))
        is_target = index > 0 and (index not in parents or draw(st.booleans()))
        owner = owners[parent] if index else None
        if is_target and owner is None:
            owner = draw(st.integers(0, 2))
        owners.append(owner)
        drawn = None
        if is_target:
            names = ("advantages", "old_logprobs")
            drawn = columns(
                size,
                sequence_ids=torch.full((size,), owner),
                **{name: torch.tensor(draw(numbers(size))) for name in names},
            )
        positions = torch.randint(0, 50, (3, size))
        segments.append(
            Segment(
                token_ids=torch.tensor(
                    draw(
                        st.lists(
                            st.sampled_from([1, 2, IMAGE, VIDEO]), min_size=size, max_size=size
                        )
                    )
                ),
                positions=text_positions(size, 7) if is_target else positions,
                parent=parent,
                is_target=is_target,
                columns=drawn,
                images=tuple(draw(st.lists(st.sampled_from("abc"), max_size=2))),
            )
        )
    return Tree(tuple(segments))


def numbers(size: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(-3, 3, width=32), min_size=size, max_size=size)


def chain(tree: Tree, index: int) -> list[int]:
    """A segment and what it continues, from the root."""
    parent = tree.segments[index].parent
    return [*(chain(tree, parent) if parent >= 0 else []), index]


def assert_counts_vision_tokens(pack: Pack) -> None:
    """The numbers of the runs are those of the index, also where a run is cut."""
    index = pack.vision_index.tolist()
    for token in range(len(pack.token_ids) + 1):
        assert pack.vision_before(token) == sum(place < token for place in index)


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(1, 8))
def test_pack_equals_the_reference(forest: list[Tree], multiple: int) -> None:
    pack = make_pack(forest, vision_token_ids=VISION, multiple=multiple)
    tokens: list[int] = []
    owner: list[tuple[int, int]] = []  # (tree, segment) of each token
    last: dict[tuple[int, int], int] = {}
    sources: list[int] = []
    targets: list[int] = []
    vision: list[int] = []
    values: dict[str, list[float]] = {"advantages": [], "old_logprobs": []}
    bounds = [0]
    for t, tree in enumerate(forest):
        for s, segment in enumerate(tree.segments):
            for j, token in enumerate(segment.token_ids.tolist()):
                here = len(tokens)
                assert pack.positions[:, here].tolist() == segment.positions[:, j].tolist()
                if segment.is_target:
                    sources.append(last[t, segment.parent] if j == 0 else here - 1)
                    targets.append(token)
                    for name in values:
                        values[name].append(float(getattr(segment.columns, name)[j]))
                elif token in VISION:
                    vision.append(here)
                tokens.append(token)
                owner.append((t, s))
                last[t, s] = here
        bounds.append(len(tokens))

    size = len(tokens)
    assert pack.token_ids[:size].tolist() == tokens
    assert pack.source_index.tolist() == sources
    assert pack.target_ids.tolist() == targets and pack.num_targets == len(targets)
    assert pack.vision_index.tolist() == vision
    assert_counts_vision_tokens(pack)
    assert pack.tree_bounds[: len(forest) + 1] == tuple(bounds)
    assert pack.images == tuple(key for tree in forest for key in tree.images)
    assert pack.feature_index.tolist() == list(range(len(vision)))
    assert pack.target_index.tolist() == list(range(len(targets)))
    everything = list(range(pack.num_tokens))
    assert pack.token_index.tolist() == pack.gather_index.tolist() == everything
    starts = [0, *(len(s.token_ids) for tree in forest for s in tree.segments)]
    assert list(pack.segment_bounds[: len(starts)]) == torch.tensor(starts).cumsum(0).tolist()
    for row, parent in enumerate(pack.parents):  # a path's parent is its last member but one
        path = pack.ancestors[row].nonzero().flatten().tolist()
        assert path[-1] == row and parent == (path[-2] if len(path) > 1 else -1)
    assert (pack.columns is not None) == bool(targets)
    for name, expected in values.items() if targets else ():
        assert getattr(pack.columns, name).tolist() == expected

    # The padding is one more tree that nobody attends to and that has no targets.
    assert len(pack.token_ids) % multiple == 0 and len(pack.token_ids) - size < multiple
    owner += [(len(forest), 0)] * (len(pack.token_ids) - size)
    assert pack.tree_bounds[-1] == len(owner) and pack.positions.shape == (3, len(owner))
    for i, (t, s) in enumerate(owner):
        for j, (u, v) in enumerate(owner):
            expected = t == u and (t == len(forest) or v in chain(forest[t], s))
            assert bool(pack.ancestors[pack.segment_ids[i], pack.segment_ids[j]]) == expected


@given(st.lists(trees(), max_size=4), st.integers(1, 4), st.integers(1, 4))
def test_parts_are_the_pack(forest: list[Tree], multiple: int, context_size: int) -> None:
    pack = make_pack(forest, vision_token_ids=VISION, multiple=multiple, context_size=context_size)
    parts = [pack.part(rank) for rank in range(context_size)]
    held = len(pack.token_ids) // context_size
    assert held % multiple == 0 and all(len(part.token_ids) == held > 0 for part in parts)
    assert sum(part.num_targets for part in parts) == pack.num_targets

    def whole(name: str) -> torch.Tensor:
        return torch.cat([getattr(part, name) for part in parts])[pack_order]

    pack_order = parts[0].gather_index
    assert whole("token_index").tolist() == list(range(pack.num_tokens))
    assert whole("token_ids").equal(pack.token_ids)
    assert torch.cat([p.positions for p in parts], 1)[:, pack_order].equal(pack.positions)
    for name in ("segment_ids", "ancestors"):
        assert all(getattr(part, name) is getattr(pack, name) for part in parts)

    # Each target on the rank that holds its source, each feature where its token is.
    sources = [part.token_index[part.source_index] for part in parts]
    assert join_targets(parts, sources).equal(pack.source_index)
    assert join_targets(parts, [part.target_ids for part in parts]).equal(pack.target_ids)
    for name, values in pack.columns.present().items() if pack.columns else ():
        assert join_targets(parts, [getattr(part.columns, name) for part in parts]).equal(values)
    placed = {
        row: int(part.token_index[index])
        for part in parts
        for row, index in zip(part.feature_index.tolist(), part.vision_index, strict=True)
    }
    assert [placed[row] for row in range(len(pack.vision_index))] == pack.vision_index.tolist()
    for part in parts:
        assert part.gather_index.equal(pack_order) and part.images == pack.images
        assert_counts_vision_tokens(part)
        runs = [token for run in part.runs for token in range(run.first, run.end)]
        assert runs == part.token_index.tolist()
        for run in part.runs:
            assert (pack.segment_ids[run.first : run.end] == run.segment).all()


def test_a_pack_for_one_context_rank_is_its_own_part() -> None:
    pack = make_pack([leaf(3)], vision_token_ids=VISION)
    assert pack.part(0) is pack


@pytest.mark.parametrize("context_size", [1, 2])
def test_an_empty_pack_is_padding(context_size: int) -> None:
    like = columns(3, advantages=torch.ones(3))
    pack = empty_pack(like, multiple=2, context_size=context_size)
    assert pack.num_tokens == 2 * context_size and pack.num_targets == 0
    assert pack.images == () and len(pack.vision_index) == 0
    part = pack.part(context_size - 1)
    assert len(part.token_ids) == 2 and part.columns is not None
    assert part.columns.present().keys() == like.present().keys() and len(part.columns.rewards) == 0


def test_prompt_tree_is_the_prompt_once_and_a_child_per_response() -> None:
    prompt = SimpleNamespace(
        token_ids=torch.tensor([5, IMAGE, 6]),
        positions=torch.tensor([[0, 1, 2]] * 3),
        next_position=3,
        images=(SimpleNamespace(key="k"),),
    )
    rewards = torch.tensor([1.0]), torch.tensor([2.0, 3.0])
    tree = prompt_tree(prompt, [[11], [12, 13]], [columns(len(x), rewards=x) for x in rewards])
    assert tree.num_tokens == 6 and tree.images == ("k",)
    pack = make_pack([tree], vision_token_ids=VISION)
    assert pack.token_ids.tolist() == [5, IMAGE, 6, 11, 12, 13]
    assert pack.positions[0].tolist() == [0, 1, 2, 3, 3, 4]
    assert pack.source_index.tolist() == [2, 2, 4]  # both responses follow the prompt's last token
    assert pack.columns is not None and pack.columns.rewards.tolist() == [1.0, 2.0, 3.0]
    plain = make_pack([prompt_tree(prompt, [[12, 13]])], vision_token_ids=VISION)
    assert plain.target_ids.tolist() == [12, 13] and plain.columns is None


def leaf(size: int) -> Tree:
    tokens = torch.ones(size, dtype=torch.long)
    return Tree((Segment(tokens, tokens.expand(3, -1), parent=-1, is_target=False),))


@given(trees(), st.randoms())
def test_parts_of_a_tree_have_whole_sequences_with_their_context(
    tree: Tree, rng: random.Random
) -> None:
    numbers = list(range(len(tree.branches())))
    rng.shuffle(numbers)
    cut = rng.randint(0, len(numbers))
    parts = [tree.part(numbers[:cut]), tree.part(numbers[cut:])]
    assert len(tree.shared) > 0, "the root is in every part"
    indices = {id(segment.token_ids): index for index, segment in enumerate(tree.segments)}
    found: list[set[int]] = []
    for part in parts:
        whole = [indices[id(segment.token_ids)] for segment in part.segments]
        assert whole == sorted(whole) and set(tree.shared) <= set(whole)
        found.append({i for i in whole if tree.segments[i].is_target})
        for index, segment in enumerate(part.segments):
            assert segment.images == tree.segments[whole[index]].images
            assert [whole[i] for i in chain(part, index)] == chain(tree, whole[index])
    for index, segment in enumerate(tree.segments):
        if segment.columns is not None and index not in tree.shared:
            its = [part for part in found if index in part]
            sequence = int(segment.columns.sequence_ids[0])
            for other, columns in enumerate(s.columns for s in tree.segments):
                if columns is not None and columns.sequence_ids[0] == sequence:
                    assert all(other in part for part in its)


@pytest.mark.parametrize(
    ("parents", "targets"), [((-1, 1), (False, False)), ((-1,), (True,)), ((-2,), (False,))]
)
def test_malformed_trees_are_bugs(parents: tuple[int, ...], targets: tuple[bool, ...]) -> None:
    one = torch.ones(1, dtype=torch.long)
    with pytest.raises(AssertionError):
        Tree(
            tuple(
                Segment(one, one.expand(3, -1), parent, is_target)
                for parent, is_target in zip(parents, targets, strict=True)
            ),
        )


@pytest.mark.parametrize("other", [None, columns(1), columns(2, advantages=torch.ones(2))])
def test_all_targets_have_the_same_columns(other: TargetColumns | None) -> None:
    one = torch.ones(1, dtype=torch.long)
    root = Segment(one, one.expand(3, -1), -1, False)
    first = Segment(one, one.expand(3, -1), 0, True, columns(1, advantages=torch.ones(1)))
    second = Segment(one, one.expand(3, -1), 0, True, other)
    with pytest.raises(AssertionError, match=r"all targets have|one row per token"):
        make_pack([Tree((root, first, second))], vision_token_ids=VISION)


def test_columns_have_one_length() -> None:
    with pytest.raises(AssertionError, match="returns: one value per target"):
        columns(2, returns=torch.ones(3))


def test_to_moves_every_tensor() -> None:
    pack = make_pack([leaf(3)], vision_token_ids=VISION).to("meta")
    assert isinstance(pack, Pack) and pack.tree_bounds == (0, 3)
    assert all(x.device.type == "meta" for x in vars(pack).values() if isinstance(x, torch.Tensor))
    assert all(x.device.type == "meta" for x in columns(2).to("meta").present().values())


def test_the_examples_of_trees_and_packs_are_true() -> None:
    tree = hello()
    tokens = [segment.token_ids.tolist() for segment in tree.segments]
    assert tree.branches() == [[1], [2]]
    assert [len(segment.token_ids) for segment in tree.part([1]).segments] == [3, 3]
    assert Tree.__doc__ is not None and ", ".join(map(str, tokens)) in Tree.__doc__
    pack = make_pack([tree], vision_token_ids=VISION)
    shown = re.findall(r"^ {8}(\w+) +(\[.*\])$", str(Pack.__doc__), re.M)
    assert len(shown) == 6
    for name, value in shown:
        assert torch.as_tensor(getattr(pack, name)).tolist() == json.loads(value), name
    assert pack.positions[0].tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    halved = make_pack([tree], vision_token_ids=VISION, context_size=2).part(0)
    assert halved.token_index.tolist() == [0, 2, 3, 5]
