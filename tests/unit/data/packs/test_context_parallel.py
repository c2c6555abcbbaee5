"""Every token on exactly one context rank, tokens and attention work shared out evenly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.data.packs.context_parallel import SegmentRun, run_tokens, split_segments

sizes = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def bounds_of(sizes: list[int]) -> list[int]:
    return [0, *torch.tensor(sizes).cumsum(0).tolist()]


@given(sizes, st.integers(1, 5))
def test_ranks_partition_the_tokens_evenly(sizes: list[int], context_size: int) -> None:
    bounds = bounds_of(sizes)
    ranks = split_segments(bounds, context_size)
    tokens = [run_tokens(runs).tolist() for runs in ranks]
    assert sorted(token for held in tokens for token in held) == list(range(bounds[-1]))
    assert all(held == sorted(held) for held in tokens)
    counts = [len(held) for held in tokens]
    assert max(counts) - min(counts) <= 1
    for runs in ranks:
        for run in runs:
            assert bounds[run.segment] <= run.first < run.end <= bounds[run.segment + 1]


@given(sizes, st.integers(1, 5))
def test_a_rank_holds_an_early_and_the_opposite_late_chunk(
    sizes: list[int], context_size: int
) -> None:
    bounds = bounds_of(sizes)
    ranks = split_segments(bounds, context_size)
    for segment, size in enumerate(sizes):
        owner = torch.full((size,), -1)
        for rank, runs in enumerate(ranks):
            for run in runs:
                if run.segment == segment:
                    owner[run.first - bounds[segment] : run.end - bounds[segment]] = rank
        if size < 2 * context_size:
            continue  # some chunks are empty
        # The order of owners, neighbours merged: 0 1 2 2 1 0 with its middle as one.
        order, lengths = owner.unique_consecutive(return_counts=True)
        expected = [*range(context_size), *reversed(range(context_size - 1))]
        assert order.tolist() == expected
        chunks = [n for i, n in enumerate(lengths.tolist()) if i != context_size - 1]
        middle = int(lengths[context_size - 1])
        chunks += [middle // 2, middle - middle // 2]
        assert max(chunks) - min(chunks) <= 1


def test_short_segments_go_round() -> None:
    ranks = split_segments([0, 1, 2, 3, 4], 2)
    assert [[run.segment for run in runs] for runs in ranks] == [[0, 2], [1, 3]]


def test_one_rank_holds_whole_segments() -> None:
    assert split_segments([0, 5, 7], 1) == [(SegmentRun(0, 0, 5), SegmentRun(1, 5, 7))]


@pytest.mark.parametrize("context_size", [2, 4, 8])
def test_attended_pairs_are_balanced(context_size: int) -> None:
    """A prompt of 3,000 tokens with responses of 50 to 800, which attend it."""
    prompt, responses = 3000, [50, 111, 237, 400, 523, 666, 731, 800]
    bounds = bounds_of([prompt, *responses])
    pairs = []
    for runs in split_segments(bounds, context_size):
        count = 0
        for run in runs:
            for token in range(run.first, run.end):
                before = 0 if run.segment == 0 else prompt
                count += before + token - bounds[run.segment] + 1
        pairs.append(count)
    assert max(pairs) / min(pairs) < 1.03
