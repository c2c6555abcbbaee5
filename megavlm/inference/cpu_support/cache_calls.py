"""Calls of attention over a KV cache: which sequences share one, and what they read.

Responses to a prompt share its tokens in the cache. Where those are most of what each attends to,
the responses are queries of one sequence, [prompt, rest of response 1, rest of response 2, ...], so
that the prompt is read once. Other sequences of similar length are the batch of one call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

# Bounds of one call: cached tokens that are gathered, shorter sequences padded to the longest, and
# pairs of a new token and a cached one.
MOST_TOKENS, MOST_PAIRS = 2**16, 2**22
# Each response of a tree meets the tokens of all: with more of them than so many times its own,
# sequences by themselves are faster (fp32, two heads of 32, prompts of 25 to 1,300 tokens).
MOST_IN_TREE = 4


@dataclass
class Call:
    """Sequences of one call of attention, with as many new tokens each. new: [their new tokens]
    positions among all new ones. slots: [sequences, tokens] of the cache. mask: [sequences, 1, new
    tokens, tokens], 0 where one attends and -inf elsewhere; None for all, or those before it if
    `is_causal`.
    """

    new: Tensor
    slots: Tensor
    mask: Tensor | None
    is_causal: bool


@dataclass
class Run:
    """Sequences [first, end), with one new token each if they are several. They have the first
    `common` tokens in common, and `tokens` different ones.
    """

    first: int
    end: int
    common: int
    tokens: int


def plan(
    req_to_token: Tensor,
    requests: Tensor,
    lengths: Sequence[int],
    new: Sequence[int],
    dtype: torch.dtype,
) -> list[Call]:
    """Return the calls in which all sequences attend to their cached tokens.

    req_to_token: [requests, model's context] slots of each request's tokens, those beyond its
    length unused. requests, lengths, new: [S] of each sequence its request, its tokens, and those
    of them that are new, at its end. dtype: of the queries.
    """
    slots = req_to_token[:, : max(lengths)][requests]  # a copy, of what is used alone
    starts = [0, *accumulate(new)]
    alone, trees = [], []
    for run in runs(slots, lengths, new):
        if run.end - run.first == 1:
            alone.append(run.first)
        else:
            trees.append(run)
    calls = []
    for places in batches([tree.tokens for tree in trees], [t.end - t.first for t in trees]):
        chosen = [trees[place] for place in places]
        calls.append(_of_trees(slots, lengths, starts, chosen, dtype))
    for places in batches([lengths[row] for row in alone], [new[row] for row in alone]):
        rows = [alone[place] for place in places]
        calls.append(_of_sequences(slots, lengths, starts, rows, dtype))
    return calls


def runs(slots: Tensor, lengths: Sequence[int], new: Sequence[int]) -> Iterator[Run]:
    """Yield all sequences: as one run those that follow each other, share at least half of their
    tokens and are faster as one tree.
    """
    equal = F.pad(slots[1:] == slots[:-1], (0, 1))
    shared = equal.byte().argmin(1).tolist()  # of each with the next: new tokens have own slots
    run, longest = Run(0, 1, lengths[0], lengths[0]), lengths[0]
    for row, length in enumerate(lengths[1:], 1):
        common = min(run.common, shared[row - 1])
        tokens = run.tokens + (run.end - run.first - 1) * (run.common - common) + length - common
        both = max(longest, length)
        is_faster = 2 * common >= both and tokens <= MOST_IN_TREE * both
        if new[run.first] == new[row] == 1 and is_faster:
            run, longest = Run(run.first, row + 1, common, tokens), both
        else:
            yield run
            run, longest = Run(row, row + 1, length, length), length
    yield run


def batches(lengths: Sequence[int], new: Sequence[int]) -> Iterator[list[int]]:
    """Yield the sequences of each call, the longest last: they have as many new tokens, and are
    within the bounds together.
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (new[row], lengths[row])):
        tokens = (len(rows) + 1) * lengths[row]
        within = tokens <= MOST_TOKENS and tokens * new[row] <= MOST_PAIRS
        if rows and (new[row] != new[rows[0]] or not within):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _of_trees(
    slots: Tensor,
    lengths: Sequence[int],
    starts: Sequence[int],
    trees: Sequence[Run],
    dtype: torch.dtype,
) -> Call:
    """Return the call of trees of as many responses each. trees: the largest last."""
    places, masks, positions = [], [], torch.arange(slots.shape[1])
    for tree in trees:
        mine, count = slots[tree.first : tree.end], tree.end - tree.first
        own = torch.tensor(lengths[tree.first : tree.end])
        rest = (positions >= tree.common) & (positions < own[:, None])
        place = torch.cat([mine[0, : tree.common], mine[rest]])
        owner = rest.nonzero()[:, 0]
        sees = F.pad(owner == torch.arange(count)[:, None], (tree.common, 0), value=True)
        padding = (0, trees[-1].tokens - tree.tokens)
        # Never read what another sequence wrote.
        places.append(F.pad(place, padding, value=int(place[0])))
        masks.append(F.pad(sees, padding))
    new = [starts[row] for tree in trees for row in range(tree.first, tree.end)]
    mask = _added(torch.stack(masks)[:, None], dtype)
    return Call(torch.tensor(new), torch.stack(places), mask, False)


def _of_sequences(
    slots: Tensor,
    lengths: Sequence[int],
    starts: Sequence[int],
    rows: Sequence[int],
    dtype: torch.dtype,
) -> Call:
    """Return the call of sequences with as many new tokens each. rows: the longest last."""
    count, longest = starts[rows[0] + 1] - starts[rows[0]], lengths[rows[-1]]
    firsts = torch.tensor([starts[row] for row in rows])
    own = torch.tensor([lengths[row] for row in rows])
    mine = slots[torch.tensor(rows), :longest]
    is_uneven = lengths[rows[0]] < longest
    if is_uneven:  # never read what another sequence wrote
        mine = torch.where(torch.arange(longest) < own[:, None], mine, mine[:, :1])
    is_causal, mask = count == longest and not is_uneven, None
    if not is_causal and (is_uneven or count > 1):
        last = own[:, None] - count + torch.arange(count)
        mask = _added(torch.arange(longest) <= last[:, None, :, None], dtype)
    positions = (firsts[:, None] + torch.arange(count)).flatten()
    return Call(positions, mine, mask, is_causal)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as attention adds it, once for all layers."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
