"""Plan of attention calls over a KV cache: which sequences share a call, and which slots they read.

Responses to a prompt share the prompt's tokens in the cache. If these are most of the tokens that
each response attends to, the responses become queries of one sequence, [prompt, rest of response 1,
rest of response 2, ...], so that the prompt is read only once. Other sequences of similar length
are batched in one call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

# Limits of one call: gathered cached tokens (shorter sequences are padded to the longest), and
# pairs of a new token with a cached token.
MOST_TOKENS, MOST_PAIRS = 2**16, 2**22
# Each response of a group computes scores with the tokens of all responses. If these are more than
# MOST_IN_GROUP times its own, or the prefix is shorter than SHORTEST_PREFIX, separate sequences are
# faster (measured in fp32 with two heads of 32, prompts of 25 to 1,300 tokens, three layers).
MOST_IN_GROUP, SHORTEST_PREFIX = 4, 64


@dataclass
class Call:
    """Sequences of one attention call, each with the same number of new tokens. new: [new tokens of
    the call], their positions among all new tokens. slots: [sequences, tokens], cache slots to
    read. mask: [sequences, 1, new tokens, tokens], 0 where a token attends and -inf elsewhere. None
    attends to all tokens or, with `is_causal`, to the tokens before.
    """

    new: Tensor
    slots: Tensor
    mask: Tensor | None
    is_causal: bool


@dataclass
class PrefixGroup:
    """Sequences [first, end); if there is more than one, each has one new token. They share their
    first `prefix` tokens, and have `tokens` distinct tokens together.
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
    """Return the attention calls for all sequences over their cached tokens.

    req_to_token: [requests, context length of the model], cache slots of each request's tokens;
    slots beyond a request's length are unused. requests, lengths, new: [S], for each sequence its
    request, its number of tokens, and how many of them are new, at its end. dtype: Dtype of the
    queries.
    """
    slots = req_to_token[:, : max(lengths)][requests]  # copies only the used part
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
    """Yield all sequences in groups. Consecutive sequences form one group if they share at least
    half of their tokens and are faster as one sequence.
    """
    equal = F.pad(slots[1:] == slots[:-1], (0, 1))
    shared = equal.byte().argmin(1).tolist()  # tokens shared with the next row; new ones never are
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
    """Yield the sequences of each call, the longest last. They have the same number of new tokens,
    and together stay within the limits of a call.
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
    """Return the call for groups of equal size. groups: The group with the most tokens comes
    last.
    """
    places, masks, positions = [], [], torch.arange(slots.shape[1])
    for group in groups:
        mine, count = slots[group.first : group.end], group.size
        own = torch.tensor(lengths[group.first : group.end])
        rest = (positions >= group.prefix) & (positions < own[:, None])
        place = torch.cat([mine[0, : group.prefix], mine[rest]])
        owner = rest.nonzero()[:, 0]
        sees = F.pad(owner == torch.arange(count)[:, None], (group.prefix, 0), value=True)
        padding = (0, groups[-1].tokens - group.tokens)
        # Pad with an own slot, never with a slot that another sequence wrote.
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
    """Return the call for sequences with equal numbers of new tokens. rows: The longest comes
    last.
    """
    count, longest = starts[rows[0] + 1] - starts[rows[0]], lengths[rows[-1]]
    firsts = torch.tensor([starts[row] for row in rows])
    own = torch.tensor([lengths[row] for row in rows])
    mine = slots[torch.tensor(rows), :longest]
    is_uneven = lengths[rows[0]] < longest
    if is_uneven:  # pad with own slots only
        mine = torch.where(torch.arange(longest) < own[:, None], mine, mine[:, :1])
    is_causal, mask = count == longest and not is_uneven, None
    if not is_causal and (is_uneven or count > 1):
        last = own[:, None] - count + torch.arange(count)
        mask = _additive(torch.arange(longest) <= last[:, None, :, None], dtype)
    positions = (firsts[:, None] + torch.arange(count)).flatten()
    return Call(positions, mine, mask, is_causal)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to the additive form, once for all layers."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
