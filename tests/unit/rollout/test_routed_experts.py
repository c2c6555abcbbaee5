"""Routed experts of responses on their way to the trainer: trees, packs, files and checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megavlm.data.packs.packing import Pack
from megavlm.data.packs.trees import Tree
from megavlm.data.processor import Processor, Prompt
from megavlm.inference.protocol import Response
from megavlm.rollout.backlog import backlog_state, restored_groups
from megavlm.rollout.episodes import _first_unrouted
from megavlm.rollout.group_tree import group_tree
from megavlm.rollout.recorded import RecordedRollouts
from megavlm.rollout.trajectory import Episode, Group
from tests.support.calls import branching_group
from tests.support.columns import columns
from tests.support.random_images import image
from tests.support.responses import make_response, plain, routed
from tests.support.trees import IMAGE, tree
from tests.unit.rollout.scripted import ROW
from tests.unit.training.test_plan import packs_of, plan


def routed_experts(token_ids: Tensor, first: int) -> Tensor:
    """Return the routed experts of tokens from place `first` on, as `routed` has them."""
    rows = [[[token % 250, index], [index, 5]] for index, token in enumerate(token_ids, first)]
    return torch.tensor(rows).reshape(-1, 2, 2)


def routed_group(processor: Processor) -> Group:
    """Return a group with branches of every kind. As from a server, only the first answer to a
    prompt has all of its routed experts, and a turn has those that the turn before lacks.
    """
    sizes = (56, 56), (84, 112), (28, 56), (56, 56)
    images = [image(*size, i) for i, size in enumerate(sizes)]
    row = replace(ROW, problem="<image>One 1<image>two 2", images=tuple(images[:2]))
    group = branching_group(processor, images, row)
    for episode in group.episodes:
        played = Episode(None)
        for number, (prompt, response) in enumerate(
            zip(episode.prompts, episode.responses, strict=True)
        ):
            first = _first_unrouted(played, prompt) if number else 0
            episode.responses[number] = with_routes(prompt, response, first)
            played.prompts.append(prompt)
            played.responses.append(episode.responses[number])
    return group


def with_routes(prompt: Prompt, response: Response, first: int = 0) -> Response:
    return routed(response, [*prompt.token_ids.tolist(), *response.token_ids.tolist()], first)


def tree_of(group: Group, **options: Any) -> Tree:
    sizes = [len(r.token_ids) for episode in group.episodes for r in episode.responses]
    return group_tree(group, [columns(size) for size in sizes], **options)


def test_all_tokens_have_routes_but_the_last_of_a_call_that_nothing_follows(
    processor: Processor,
) -> None:
    group = routed_group(processor)
    (first, second, *_) = group.episodes[0].responses
    assert first.routed_experts is not None and second.routed_experts is not None
    assert len(second.routed_experts) < len(first.routed_experts) + 20, (
        "a turn does not repeat the turn before"
    )
    found = tree_of(group, replays_routing=True)
    ends, incomplete = [], 0
    for index, segment in enumerate(found.segments):
        start = ends[segment.parent] if segment.parent >= 0 else 0
        ends.append(start + len(segment.token_ids))
        assert segment.routed_experts is not None
        expected = routed_experts(segment.token_ids, start)[: len(segment.routed_experts)]
        assert torch.equal(segment.routed_experts.long(), expected)
        continued = any(other.parent == index for other in found.segments)
        incomplete += not continued
        assert len(segment.routed_experts) == len(segment.token_ids) - (not continued)
    assert 5 < incomplete < len(found.segments)
    assert all(segment.routed_experts is None for segment in tree_of(group).segments), (
        "the key is false"
    )


@pytest.mark.parametrize("context_size", [1, 2])
def test_a_rank_gets_the_routes_of_the_tokens_that_it_holds(context_size: int) -> None:
    def routed_tree(*arguments: Any) -> Tree:
        made, segments = tree(*arguments), []
        for segment in made.segments:
            start = len(made.segments[0].token_ids) if segment.is_target else 0
            known = routed_experts(segment.token_ids, start)[: -1 if segment.is_target else None]
            segments.append(replace(segment, routed_experts=known.to(torch.uint8)))
        return Tree(tuple(segments))

    trees = [[routed_tree(4, [3, 1], "a"), routed_tree(5, [2], "b")], [tree(4, [2], "c")]]
    planned = plan(1, trees, multiple=2, context_size=context_size)
    held: list[Pack] = []
    for context_rank in range(context_size):
        ((routed_packs, plain_packs),) = packs_of(planned, context_rank)
        assert all(pack.routed_experts is None for pack in plain_packs)
        assert all(pack.without_routed_experts().routed_experts is None for pack in routed_packs)
        held += routed_packs
    num_known = 0
    for pack in held:
        assert pack.routed_experts is not None and pack.routed_experts.experts.dtype == torch.uint8
        places = pack.positions[0]  # of text: the place in the sequence
        known = pack.routed_experts.is_known
        for token, place, row in zip(
            pack.token_ids[known], places[known], pack.routed_experts.experts[known], strict=True
        ):
            assert torch.equal(row[None].long(), routed_experts(token[None], int(place)))
            assert int(token) in (1, IMAGE)
        num_known += int(known.sum())
    assert num_known == 4 + 5 + 2 + 0 + 1


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_a_checkpoint_keeps_the_routes_of_open_groups(processor: Processor, dtype: Any) -> None:
    prompt = processor.prompt(ROW)
    begun = with_routes(prompt, make_response((7, 8), (-1.0, -0.5), "abort"))
    assert begun.routed_experts is not None
    begun = replace(begun, routed_experts=begun.routed_experts.astype(dtype))
    done = make_response((7,), (-1.0,))
    groups = [Group(prompt, [begun], step=3), Group(prompt), Group(prompt, [done, begun])]
    restored = restored_groups(backlog_state(groups), lambda index: prompt)
    for mine, theirs in zip(restored, groups, strict=True):
        assert [*map(plain, mine.responses)] == [*map(plain, theirs.responses)]
        assert mine.step == theirs.step


def test_recorded_routes_are_replayed(tmp_path: Path, processor: Processor) -> None:
    group, recorded = routed_group(processor), RecordedRollouts(tmp_path)
    recorded.save(1, [group])
    rows: Any = [None] * ROW.index + [group.prompt.row]
    (read,) = recorded.load(1, rows, processor)
    before, after = tree_of(group, replays_routing=True), tree_of(read, replays_routing=True)
    for mine, theirs in zip(after.segments, before.segments, strict=True):
        assert mine.routed_experts is not None and theirs.routed_experts is not None
        assert torch.equal(mine.routed_experts, theirs.routed_experts)
