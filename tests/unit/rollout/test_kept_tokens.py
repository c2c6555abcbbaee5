"""Tokens that top-p and top-k kept, on their way from a server's answer to a rank's packs, and a
teacher's likeliest tokens on the same way.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megavlm.data.packs.token_sets import TokenSets
from megavlm.data.packs.trees import Tree
from megavlm.data.processor import Processor
from megavlm.inference.answers import parse_continue, parse_generate
from megavlm.inference.bodies import continue_body, generate_body
from megavlm.inference.errors import RolloutRequestError
from megavlm.inference.protocol import KeptTokens, Response, SamplingParams, TopTokens
from megavlm.rollout.backlog import backlog_state, restored_groups
from megavlm.rollout.group_tree import group_tree
from megavlm.rollout.groups import kept_metrics
from megavlm.rollout.recorded import RecordedRollouts
from megavlm.rollout.trajectory import Group
from tests.support.calls import branching_group
from tests.support.columns import columns
from tests.support.prompts import make_prompt
from tests.support.random_images import image
from tests.support.responses import make_response, plain
from tests.support.trees import tree
from tests.unit.rollout.scripted import ROW
from tests.unit.training.test_plan import packs_of, plan

HOW = SamplingParams(1.0, 9, top_p=0.9, top_k=50, returns_kept=True, vocab_size=300)
PROMPT = make_prompt(num_tokens=5)


def set_of(token: int, place: int) -> list[int]:
    """Return the kept tokens of a token at a place: none to three, which tell places apart."""
    return [token + 1, place, token][3 - place % 4 :]


def with_sets(response: Response) -> Response:
    sets = [set_of(token, place) for place, token in enumerate(response.token_ids.tolist())]
    ids = np.array([token for kept in sets for token in kept], np.int32)
    top = top_of(response.token_ids, np.arange(len(sets)))
    return replace(
        response,
        kept=KeptTokens(np.array([*map(len, sets)], np.int32), ids),
        teacher_logprobs=top.logprobs[:, 0],
        teacher_top=top,
    )


def top_of(tokens: Any, places: Any) -> TopTokens:
    """Return a teacher's two tokens for each token at a place. Their log-probs tell places
    apart.
    """
    ids = np.stack([tokens, tokens + 3], 1).astype(np.int32)
    return TopTokens(ids, -(ids + np.stack([places, places], 1) / 100).astype(np.float32))


def as_lists(sets: TokenSets | None) -> list[list[int]]:
    assert sets is not None
    return [part.tolist() for part in sets.ids.split(sets.sizes.tolist())]


def answer(tokens: list[int], num_before: int = 0, **changed: Any) -> dict[str, Any]:
    meta = {
        "output_token_logprobs": [(-0.5, token) for token in tokens],
        "output_token_sampling_mask": [[token, token + 1] for token in tokens],
        "output_token_sampling_logprobs": [-0.25] * len(tokens),
        "finish_reason": {"type": "stop"},
        "prompt_tokens": len(PROMPT.token_ids) + num_before,
        "weight_version": "1",
    }
    return {"meta_info": meta | changed}


def test_answers_have_the_kept_tokens_and_log_probs_among_them() -> None:
    body = json.loads(b"".join(generate_body([PROMPT], 2, HOW)))
    assert body["return_sampling_mask"] is True
    assert len(body["input_ids"]) == 2 and body["sampling_params"]["n"] == 1
    assert body["sampling_params"]["top_p"] == 0.9 and body["sampling_params"]["top_k"] == 50
    aborted = answer([7, 8], finish_reason={"type": "abort"})
    ((begun,),) = parse_generate(aborted, [PROMPT], 1, HOW)
    assert begun.logprobs.tolist() == [-0.25] * 2
    assert json.loads(b"".join(continue_body(PROMPT, [begun], HOW)))["return_sampling_mask"] is True
    (response,) = parse_continue(answer([4], 2), PROMPT, [begun], HOW)
    assert response.kept is not None
    assert response.kept.sizes.tolist() == [2, 2, 2] and response.kept.sizes.dtype == np.int32
    assert response.kept.ids.tolist() == [7, 8, 8, 9, 4, 5] and response.kept.ids.dtype == np.int32
    queued = answer([], 2, finish_reason={"type": "abort"}, output_token_sampling_mask=None)
    (waiting,) = parse_continue(queued, PROMPT, [begun], HOW)
    assert plain(waiting) == plain(begun)


def test_a_begin_from_the_whole_vocabulary_has_empty_sets() -> None:
    begun, rest = make_response((7, 8), (-1.0, -0.5), "abort"), with_sets(make_response((9,), (0,)))
    joined, other = begun.then(rest).kept, rest.then(begun).kept
    assert joined is not None and joined.sizes.tolist() == [0, 0, 0] and not len(joined.ids)
    assert other is not None and other.sizes.tolist() == [0, 0, 0]
    assert begun.then(begun).kept is None


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"output_token_sampling_mask": [[7]]}, "2 tokens have 1 sets"),
        ({"output_token_sampling_logprobs": [-0.5]}, "2 tokens have 2 sets"),
        ({"output_token_sampling_mask": [[7], [7]]}, "a token is not among the tokens"),
        ({"output_token_sampling_mask": [[7], []]}, "a token is not among the tokens"),
        ({"output_token_sampling_mask": [[7], [8, 300]]}, "a token is not among the tokens"),
        ({"output_token_sampling_mask": [[7], 8]}, "has no len"),
        ({"output_token_sampling_logprobs": [-0.5, None]}, "not finite"),
    ],
)
def test_other_sets_are_malformed(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        parse_generate(answer([7, 8], **changed), [PROMPT], 1, HOW)


def test_a_server_that_returns_no_sets_is_refused() -> None:
    without = answer([7], output_token_sampling_mask=None)
    with pytest.raises(RolloutRequestError, match=r"install SGLang 0\.5\.23 there, or set rollout"):
        parse_generate(without, [PROMPT], 1, HOW)
    how = replace(HOW, returns_kept=False)
    ((response,),) = parse_generate(without, [PROMPT], 1, how)
    assert response.kept is None and response.logprobs.tolist() == [-0.5]
    assert "return_sampling_mask" not in json.loads(b"".join(generate_body([PROMPT], 1, how)))


def group_with_sets(processor: Processor) -> Group:
    """Return a group with branches of every kind. One response is of the whole vocabulary."""
    images = [image(*size, i) for i, size in enumerate(((56, 56), (84, 112), (28, 56), (56, 56)))]
    row = replace(ROW, problem="<image>One 1<image>two 2", images=tuple(images[:2]))
    group = branching_group(processor, images, row)
    for episode in group.episodes:
        episode.responses[:] = map(with_sets, episode.responses)
    last = group.episodes[-1].responses
    last[-1] = replace(last[-1], kept=None, teacher_top=None)
    return group


def tree_of(group: Group) -> Tree:
    sizes = [len(r.token_ids) for episode in group.episodes for r in episode.responses]
    tables = [columns(size, teacher_logprobs=torch.zeros(size)) for size in sizes]
    return group_tree(group, tables)


def test_each_target_has_its_own_set(processor: Processor) -> None:
    found, num_cut = tree_of(group_with_sets(processor)), 0
    without = 0
    for segment in found.segments:
        if not segment.is_target or segment.kept is None:
            without += segment.is_target
            assert segment.teacher is None
            continue
        above, first = found.segments[segment.parent], 0
        if above.is_target and above.kept is not None and len(above.token_ids) % 4:
            num_cut += 1  # a response that another call cuts
            first = len(above.token_ids)
        tokens = segment.token_ids.tolist()
        assert as_lists(segment.kept) == [set_of(t, i) for i, t in enumerate(tokens, first)]
        top = top_of(segment.token_ids.numpy(), np.arange(first, first + len(tokens)))
        assert segment.teacher is not None
        for found_values, values in zip(segment.teacher.table(), top, strict=True):
            assert found_values.tolist() == values.tolist()
    assert num_cut and without == 1


@pytest.mark.parametrize("context_size", [1, 2])
def test_a_rank_gets_the_sets_of_its_targets(context_size: int) -> None:
    def tree_with_sets(*arguments: Any) -> Tree:
        segments = []
        for number, segment in enumerate(tree(*arguments).segments):
            kept = None
            if number != 2:
                sets = [set_of(1, place) for place in range(len(segment.token_ids))]
                ids = torch.tensor([token for kept in sets for token in kept], dtype=torch.int32)
                logprobs = torch.arange(len(ids)) / -8
                kept = TokenSets.of(
                    torch.tensor([*map(len, sets)], dtype=torch.int32), ids, logprobs
                )
            kept = kept if segment.is_target else None
            segments.append(replace(segment, kept=kept, teacher=kept))
        return Tree(tuple(segments))

    trees = [[tree_with_sets(4, [3, 2], "a"), tree_with_sets(5, [4], "b")], [tree(4, [2], "c")]]
    planned, seen = plan(1, trees, multiple=2, context_size=context_size), 0
    for context_rank in range(context_size):
        ((packs, plain_packs),) = packs_of(planned, context_rank)
        assert all(pack.kept is None for pack in plain_packs)
        for pack in packs:
            assert pack.columns is not None and pack.kept is not None
            assert as_lists(pack.teacher) == as_lists(pack.kept)
            assert pack.teacher is not None and pack.teacher.logprobs is not None
            places = pack.columns.rewards.int().tolist()  # of a token in its response
            numbers = pack.columns.sequence_ids.tolist()
            logprobs = pack.teacher.logprobs.split(pack.teacher.sizes.tolist())
            for place, number, kept, values in zip(
                places, numbers, as_lists(pack.kept), logprobs, strict=True
            ):
                assert kept == ([] if number else set_of(1, place))
                before = sum(len(set_of(1, earlier)) for earlier in range(place))
                assert values.tolist() == [(before + i) / -8 for i in range(len(kept))]
                seen += 1
            moved = pack.to("meta").teacher
            assert moved is not None and moved.ids.is_meta and moved.logprobs.is_meta  # type: ignore[union-attr]
    assert seen == 3 + 2 + 4


def test_sets_of_each_chunk_have_its_rows() -> None:
    sets = TokenSets.of(torch.tensor([2, 0, 1, 3]).int(), torch.tensor([5, 6, 7, 8, 9, 5]).int())
    chunks = [(rows.tolist(), ids.tolist()) for rows, ids in sets.chunks(2, first=6)]
    assert chunks == [([0, 0], [-1, 0]), ([0, 1, 1, 1], [1, 2, 3, -1])]


def test_a_table_of_a_teachers_sets_is_filled_up() -> None:
    sizes, ids = torch.tensor([2, 0, 1]).int(), torch.tensor([5, 6, 7]).int()
    table = TokenSets.of(sizes, ids, torch.tensor([-1.0, -2.0, -3.0])).table()
    assert table[0].tolist() == [[5, 6], [-1, -1], [7, -1]]
    assert table[1].exp().tolist() == [
        [*torch.tensor([-1.0, -2.0]).exp()],
        [0, 0],
        [*torch.tensor([-3.0, -1e30]).exp()],
    ]


def test_a_checkpoint_keeps_the_sets_of_open_groups(processor: Processor) -> None:
    prompt = processor.prompt(ROW)
    begun = with_sets(make_response(range(7, 12), [-1.0] * 5, "abort"))
    groups = [Group(prompt, [begun, make_response((7,), (-1.0,)), begun], step=3)]
    (restored,) = restored_groups(backlog_state(groups), lambda index: prompt)
    assert [*map(plain, restored.responses)] == [*map(plain, groups[0].responses)]


def test_recorded_sets_are_replayed(tmp_path: Path, processor: Processor) -> None:
    group, recorded = group_with_sets(processor), RecordedRollouts(tmp_path)
    recorded.save(1, [group])
    rows: Any = [None] * ROW.index + [group.prompt.row]
    (read,) = recorded.load(1, rows, processor)
    for mine, theirs in zip(read.episodes, group.episodes, strict=True):
        assert [*map(plain, mine.responses)] == [*map(plain, theirs.responses)]


def test_metrics_tell_the_sizes_of_sets() -> None:
    response = with_sets(make_response(range(7, 12), [-1.0] * 5))  # 0, 1, 2, 3 and 0 tokens
    expected = {"kept_tokens": 1.2, "kept_tokens_max": 3.0, "kept_bytes": 4 * (5 + 6)}
    assert kept_metrics([response, make_response((7,), (-1.0,))]) == pytest.approx(expected)
    assert kept_metrics([make_response((7,), (-1.0,))]) == {}
