"""Gated delta rule in PyTorch operations, with the arguments of flash-linear-attention's kernel
that tree attention uses. It computes in fp32 for inputs of any dtype.

For each head, with a key k and a query q of unit length, a value v, a log decay g <= 0 and a write
strength b in [0, 1]:

    S_t = e^g_t S_(t-1) + k_t (b_t (v_t - k_t e^g_t S_(t-1)))^T        o_t = q_t S_t / sqrt(K)

Sequences are cut into chunks. Everything that does not depend on the state is computed for all
chunks at once; then the states are computed chunk after chunk. Shapes: N sequences, n chunks of c
tokens, h key heads, H heads, K and V the sizes of keys and values.

Source: Yang et al., Gated Delta Networks, arXiv 2412.06464, section 3.3.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # maximum number of tokens in a chunk


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the rule over N sequences, concatenated in a batch of 1.

    q, k: [1, T, h, K]
    v: [1, T, H, V]
    g, beta: [1, T, H]
    initial_state: [N, H, K, V], None for zeros.
    cu_seqlens: [N + 1] Bounds of the sequences.

    Returns the outputs [1, T, H, V] and the final states [N, H, K, V], or None in their place
    unless `output_final_state`.
    """
    bounds = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    chunks = _chunks([end - first for first, end in pairwise(bounds)], v.device)
    query, key, value, decay, write = (_cut(x[0], chunks.tokens) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query), _unit(key)
    query = query * (query.size(-1) ** -0.5 if scale is None else scale)

    # [n, H, c, c]: log decay from the column's token to the row's token. Each stretch is summed
    # separately: differences of one running sum would lose precision where decay is strong.
    size = chunks.tokens.size(1)
    stretch = decay[..., None].expand(*decay.shape, size).tril(-1).cumsum(-2)
    future = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    between = stretch.masked_fill(future, -torch.inf).exp()
    since_start, to_end = decay.cumsum(-1).exp(), between[..., -1, :]

    copies = value.size(1) // key.size(1)
    overlap = (key @ key.mT).repeat_interleave(copies, 1) * between * write[..., None]
    scores = (query @ key.mT).repeat_interleave(copies, 1) * between
    query, key = (x.repeat_interleave(copies, 1) for x in (query, key))
    wanted = torch.cat([value, key * since_start[..., None]], dim=-1) * write[..., None]
    # Each token's write removes what earlier tokens of the chunk wrote to its key.
    solved = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    new, recalled = solved.split([value.size(-1), key.size(-1)], dim=-1)
    query, key = query * since_start[..., None], key * to_end[..., None]
    kept = since_start[..., -1, None, None]

    state = value.new_zeros(len(bounds) - 1, value.size(1), key.size(-1), value.size(-1))
    if initial_state is not None:
        state = initial_state.to(state.dtype)
    state = state.index_select(0, chunks.sequences)
    outputs, final = [], []
    for step in chunks.steps:  # the longest sequences come first, so the ended ones are at the end
        count = step.stop - step.start
        final.append(state[count:])
        state = state[:count]
        writes = new[step] - recalled[step] @ state
        outputs.append(query[step] @ state + scores[step] @ writes)
        state = state * kept[step] + key[step].mT @ writes
    final.append(state)
    output = torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, chunks.indices)
    states = torch.cat(final[::-1]).index_select(0, chunks.sequences.argsort())
    return output.unsqueeze(0).to(v.dtype), states if output_final_state else None


class _Chunks(NamedTuple):
    tokens: Tensor  # [n, c] token of each place; T if the place is empty
    indices: Tensor  # [T] index of each token among the n x c
    steps: tuple[slice, ...]  # first chunks of all sequences, second chunks where they exist, ...
    sequences: Tensor  # [N] the sequences, longest first


def _chunks(sizes: list[int], device: torch.device) -> _Chunks:
    """Cut concatenated sequences of the given sizes into chunks. The plan is made on the host."""
    total, chunk = sum(sizes), min(CHUNK, max(sizes))
    lengths = torch.tensor(sizes)
    sequences = lengths.argsort(descending=True, stable=True)
    starts = (lengths.cumsum(0) - lengths)[sequences]
    ends = starts + lengths[sequences]
    rows, steps, first = [], [], 0
    for offset in range(0, max(sizes), chunk):
        going = int((starts + offset < ends).sum())
        index = starts[:going, None] + torch.arange(offset, offset + chunk)
        rows.append(index.where(index < ends[:going, None], total))
        steps.append(slice(first, first + going))
        first += going
    index = torch.cat(rows)
    # Empty places have token T and are sorted behind the others.
    indices = index.flatten().argsort()[:total]
    return _Chunks(index.to(device), indices.to(device), tuple(steps), sequences.to(device))


def _cut(x: Tensor, index: Tensor) -> Tensor:
    """Return the chunks of x [T, heads, ...] as [n, heads, c, ...]. Empty places are zeros: tokens
    that neither decay the state nor write to it.
    """
    x = x.float()
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
