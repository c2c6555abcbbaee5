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
# Each response of a group meets the tokens of all: with more of them than so many times its own,
# or with a shorter prefix, sequences by themselves are faster (fp32, two heads of 32, prompts of 25
# to 1,300 tokens, three layers).
MOST_IN_GROUP, SHORTEST_PREFIX = 4, 64


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
class PrefixGroup:
    """Sequences [first, end), with one new token each if they are several. They share their first
    `prefix` tokens, and have `tokens` different ones.
    """

    first: int
    end: int
    prefix: int
    tokens: int

    @property
    def size(self) -> int:
        return self.end - self.first


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
    found = list(prefix_groups(slots, lengths, new))
    groups = [group for group in found if group.size > 1]
    alone = [group.first for group in found if group.size == 1]
    calls = []
    for places in batches([group.tokens for group in groups], [group.size for group in groups]):
        chosen = [groups[place] for place in places]
        calls.append(_of_groups(slots, lengths, starts, chosen, dtype))
    for places in batches([lengths[row] for row in alone], [new[row] for row in alone]):
        rows = [alone[place] for place in places]
        calls.append(_of_sequences(slots, lengths, starts, rows, dtype))
    return calls


def prefix_groups(
    slots: Tensor, lengths: Sequence[int], new: Sequence[int]
) -> Iterator[PrefixGroup]:
    """Yield all sequences: as one group those that follow each other, share at least half of their
    tokens and are faster as one sequence.
    """
    equal = F.pad(slots[1:] == slots[:-1], (0, 1))
    shared = equal.byte().argmin(1).tolist()  # of each with the next: new tokens have own slots
    group, longest = PrefixGroup(0, 1, lengths[0], lengths[0]), lengths[0]
    for row, length in enumerate(lengths[1:], 1):
        prefix = min(group.prefix, shared[row - 1])
        tokens = group.tokens + (group.size - 1) * (group.prefix - prefix) + length - prefix
        both = max(longest, length)
        is_faster = prefix >= max(SHORTEST_PREFIX, both / 2) and tokens <= MOST_IN_GROUP * both
        if new[group.first] == new[row] == 1 and is_faster:
            group, longest = PrefixGroup(group.first, row + 1, prefix, tokens), both
        else:
            yield group
            group, longest = PrefixGroup(row, row + 1, length, length), length
    yield group


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


def _of_groups(
    slots: Tensor,
    lengths: Sequence[int],
    starts: Sequence[int],
    groups: Sequence[PrefixGroup],
    dtype: torch.dtype,
) -> Call:
    """Return the call of groups of one size. groups: the one with most tokens last."""
    places, masks, positions = [], [], torch.arange(slots.shape[1])
    for group in groups:
        mine, count = slots[group.first : group.end], group.size
        own = torch.tensor(lengths[group.first : group.end])
        rest = (positions >= group.prefix) & (positions < own[:, None])
        place = torch.cat([mine[0, : group.prefix], mine[rest]])
        owner = rest.nonzero()[:, 0]
        sees = F.pad(owner == torch.arange(count)[:, None], (group.prefix, 0), value=True)
        padding = (0, groups[-1].tokens - group.tokens)
        # Never read what another sequence wrote.
        places.append(F.pad(place, padding, value=int(place[0])))
        masks.append(F.pad(sees, padding))
    new = [starts[row] for group in groups for row in range(group.first, group.end)]
    mask = _additive(torch.stack(masks)[:, None], dtype)
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
        mask = _additive(torch.arange(longest) <= last[:, None, :, None], dtype)
    positions = (firsts[:, None] + torch.arange(count)).flatten()
    return Call(positions, mine, mask, is_causal)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask in the form that attention adds to its scores, once for all layers."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
