"""Trees of episodes whose prompts need not extend the calls before them."""

from itertools import takewhile

import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.config.algorithm import GRPO
from megavlm.data.packs.packing import make_pack
from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.trees import Segment, Tree
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.inference.protocol import Response
from megavlm.rollout.group_tree import group_tree
from megavlm.rollout.groups import policy_trees
from megavlm.rollout.trajectory import Group
from tests.support.calls import branching_group, episode
from tests.support.columns import columns, of_calls
from tests.support.prompts import make_image
from tests.support.random_images import image
from tests.support.responses import make_response

Call = tuple[Prompt, Response]
IMAGE = 9
ROW = Row(0, "", "", (), "", "")
SIZES = (56, 56), (84, 112), (28, 56), (56, 56)
IMAGES = [make_image(key, 4, 4) for key in "ab"]  # four tokens each


def call(content: str, response: str, position: int | None = None) -> Call:
    """A prompt of digits and of images a and b, and a response of digits."""
    ids: list[int] = []
    starts = []
    for letter in content:
        if letter in "ab":
            starts.append(len(ids))
        ids += [IMAGE] * 4 if letter in "ab" else [int(letter)]
    images = tuple(IMAGES["ab".index(letter)] for letter in content if letter in "ab")
    prompt = Prompt(
        ROW, torch.tensor(ids), (), text_positions(len(ids), 0), len(ids), images, tuple(starts)
    )
    said = tuple(map(int, response))
    return prompt, make_response(said, tuple(-0.1 * i for i in range(len(said))), "stop", "0")


def tree_of(*episodes: list[Call]) -> Tree:
    """The tree of a group. A target's number among all of them is in its reward."""
    group = Group(episodes[0][0][0], episodes=[episode(*calls) for calls in episodes])
    count, parts = 0, []
    for number, played in enumerate(group.episodes):
        size = played.num_tokens
        rewards = torch.arange(float(count), float(count + size))
        parts.append(columns(size, rewards=rewards, sequence_ids=torch.full((size,), number)))
        count += size
    return group_tree(group, of_calls(group, parts))


def shape(tree: Tree) -> list[tuple[str, int, bool, str]]:
    return [
        ("".join(map(str, s.token_ids.tolist())), s.parent, s.is_target, "".join(s.images))
        for s in tree.segments
    ]


def path(tree: Tree, index: int) -> list[Segment]:
    parent = tree.segments[index].parent
    return [*(path(tree, parent) if parent >= 0 else []), tree.segments[index]]


def assert_has_calls(tree: Tree, *episodes: list[Call]) -> None:
    """Each call is a path of the tree, whose targets at its end are the call's own."""
    targets = [i for i, s in enumerate(tree.segments) if s.is_target]
    rewards = [x for i in targets for x in tree.segments[i].columns.rewards.tolist()]  # type: ignore[union-attr]
    assert rewards == [float(i) for i in range(len(rewards))], "each once, in order"
    ends = {int(tree.segments[i].columns.rewards[-1]): i for i in targets}  # type: ignore[union-attr]
    end = -1
    for calls in episodes:
        for prompt, response in calls:
            end += len(response.token_ids)
            segments = path(tree, ends[end])
            ids = torch.cat([s.token_ids for s in segments]).tolist()
            assert ids == [*prompt.token_ids.tolist(), *response.token_ids]
            positions = torch.cat([s.positions for s in segments], dim=1)
            size = len(prompt.token_ids)
            assert positions[:, :size].equal(prompt.positions)
            after = text_positions(len(response.token_ids), prompt.next_position)
            assert positions[:, size:].equal(after)
            assert [k for s in segments for k in s.images] == [x.key for x in prompt.images]
            at, owned = 0, []
            for segment in segments:
                if at >= size:
                    owned.append(segment)
                at += len(segment.token_ids)
            assert all(segment.is_target for segment in owned)
            assert sum(len(segment.token_ids) for segment in owned) == len(response.token_ids)
    assert end == len(rewards) - 1


def test_chains_are_a_prompt_with_turns_below_it() -> None:
    tree = tree_of(
        [call("12a3", "45"), call("12a345b6", "7")],
        [call("12a3", "45"), call("12a3456", "8"), call("12a345681", "2")],
    )
    assert shape(tree) == [
        ("1299993", -1, False, "a"),
        ("45", 0, True, ""),
        ("99996", 1, False, "b"),
        ("7", 2, True, ""),
        ("45", 0, True, ""),
        ("6", 4, False, ""),
        ("8", 5, True, ""),
        ("1", 6, False, ""),
        ("2", 7, True, ""),
    ]
    assert tree.branches() == [[1, 2, 3], [4, 5, 6, 7, 8]]


def test_a_branch_is_where_a_prompt_differs() -> None:
    calls = [
        call("123", "45"),
        call("1234567", "8"),
        call("1234561", "2"),  # in the observation
        call("12345", "3"),  # right after the response
        call("1243", "1"),  # in the prompt
        call("123411", "6"),  # in the first response
        call("123", "45"),  # the same once more
    ]
    tree = tree_of(calls)
    assert shape(tree) == [
        ("12", -1, False, ""),
        ("3", 0, False, ""),
        ("4", 1, True, ""),
        ("5", 2, True, ""),
        ("6", 3, False, ""),
        ("7", 4, False, ""),
        ("8", 5, True, ""),
        ("1", 4, False, ""),
        ("2", 7, True, ""),
        ("3", 3, True, ""),
        ("43", 0, False, ""),
        ("1", 10, True, ""),
        ("11", 2, False, ""),
        ("6", 12, True, ""),
        ("45", 1, True, ""),
    ]
    assert_has_calls(tree, calls)
    assert len(tree.branches()) == 1 and tree.part([0]) is tree, "an episode is never cut"


def test_images_of_one_size_are_told_apart() -> None:
    calls = [call("1ab2", "3"), call("1bb2", "3"), call("1aa2", "4"), call("1ab24", "5")]
    tree = tree_of(calls)
    assert shape(tree)[:4] == [
        ("1", -1, False, ""),
        ("9999", 0, False, "a"),
        ("99992", 1, False, "b"),
        ("3", 2, True, ""),
    ]
    assert_has_calls(tree, calls)
    pack = make_pack([tree], vision_token_ids=[IMAGE])
    assert pack.images == tree.images and len(pack.vision_index) == 4 * len(tree.images)


def test_image_tokens_that_a_policy_sampled_are_no_image() -> None:
    calls = [call("1", "9999"), call("1a2", "3"), call("1", "2")]
    tree = tree_of(calls)
    assert shape(tree)[2] == ("99992", 0, False, "a")
    assert_has_calls(tree, calls)


def test_an_episode_shares_no_response_of_another() -> None:
    tree = tree_of([call("12", "34")], [call("12", "34"), call("12345", "6")], [call("1234", "5")])
    assert [s.parent for s in tree.segments] == [-1, 0, 0, 2, 3, 0, 5]
    assert len(tree.branches()) == 3


def test_a_part_has_no_more_than_the_calls_of_its_episode() -> None:
    """The prompt of the first episode has the tokens of the second one's response."""
    second = [call("1", "2"), call("1234", "6")]
    tree = tree_of([call("123", "5")], second)
    assert tree.part([1]).num_tokens == num_distinct(second) == 5


def test_prompts_that_begin_otherwise_are_roots_of_one_tree() -> None:
    episodes = [[call("12", "3"), call("456", "7")], [call("457", "1"), call("12", "2")]]
    tree = tree_of(*episodes)
    assert [s.parent for s in tree.segments] == [-1, 0, -1, 2, 3, 2, 5, 0]
    assert_has_calls(tree, *episodes)
    # Both have the roots, so that these are in each part.
    assert tree.branches() == [[1, 3, 4], [5, 6, 7]] and tree.shared == [0, 2]
    assert shape(tree.part([1])) == [
        ("12", -1, False, ""),
        ("45", -1, False, ""),
        ("7", 1, False, ""),
        ("1", 2, True, ""),
        ("2", 0, True, ""),
    ]
    pack = make_pack([tree], vision_token_ids=[IMAGE])
    assert not pack.ancestors[2:5, 0].any(), "a root does not see another"


digits = st.text("123", min_size=1, max_size=4)


@st.composite
def played_calls(draw: st.DrawFn) -> list[list[Call]]:
    """Episodes whose prompts are often the start of an earlier call, with another end."""
    made: list[list[Call]] = []
    texts = [draw(digits) + draw(st.sampled_from(["", "a", "ab"]))]
    for _ in range(draw(st.integers(1, 3))):
        calls = []
        for _ in range(draw(st.integers(1, 4))):
            before = draw(st.sampled_from(texts))
            kept = before[: draw(st.integers(0, len(before)))]
            content = kept + draw(st.text("12ab", min_size=not kept, max_size=4))
            response = draw(digits)
            calls.append(call(content, response))
            texts.append(content + response)
        made.append(calls)
    return made


@given(played_calls())
def test_each_call_is_a_path_that_shares_all_that_it_can(episodes: list[list[Call]]) -> None:
    tree = tree_of(*episodes)
    assert_has_calls(tree, *episodes)
    alone = [num_distinct(calls) for calls in episodes]
    if len(episodes) == 1:
        assert tree.num_tokens == alone[0]
        return
    # A part has no more than its episode alone: what fits a pack alone also fits it in its group.
    assert [tree.part([i]).num_tokens for i in range(len(episodes))] == alone
    assert tree.num_tokens <= sum(alone)


def num_distinct(calls: list[Call]) -> int:
    """The tokens of an episode's responses, and of its prompts after their longest known prefix."""
    count, known = 0, list[list[str]]()
    for prompt, response in calls:
        tokens = [str(token) for token in prompt.token_ids.tolist()]
        for start, shown in zip(prompt.image_starts, prompt.images, strict=True):
            tokens[start : start + 4] = [shown.key] * 4
        shared = [num_common(tokens, other) for other in known]
        count += len(tokens) - max(shared, default=0) + len(response.token_ids)
        known.append([*tokens, *map(str, response.token_ids)])
    return count


def num_common(tokens: list[str], others: list[str]) -> int:
    pairs = zip(tokens, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_a_group_with_branches_has_the_columns_of_its_responses(processor: Processor) -> None:
    images = [image(*size, seed) for seed, size in enumerate(SIZES)]
    group = branching_group(processor, images)
    (tree,) = policy_trees([group], GRPO(), max_new_tokens=9, max_turns=6)
    found = [s.columns for s in tree.segments if s.columns is not None]
    logprobs = [x for part in found for x in part.rollout_logprobs.tolist()]
    sampled = [x for e in group.episodes for r in e.responses for x in r.logprobs]
    assert logprobs == torch.tensor(sampled).tolist()
    turns = [int(x) for part in found for x in part.turn_ids.unique()]
    assert turns == [0, 0, 1, 2, 3, 4, 5, 0, 1, 2], "the first response is cut in two"
    assert len(tree.branches()) == 2
    whole = sum(len(p.token_ids) for p in group.prompts) + len(logprobs)
    assert tree.num_tokens < whole / 2
