"""Image features: each distinct picture encoded once, the work spread over the tensor axis, then
put among the tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Grid = tuple[int, int, int]  # (t, h, w) in patches
Encode = Callable[
    [Tensor, Sequence[Grid]], Tensor
]  # patches [P, patch], grids -> features [P / merge^2, H]


def split_by_cost(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Indices of each part: the costliest first, always to the part that has least (deterministic
    on every rank).
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0.0] * num_parts
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += costs[index]
    return [sorted(part) for part in parts]


def encode_pictures(
    encode: Encode,
    patches: Sequence[Tensor],
    grids: Sequence[Grid],
    *,
    merge_size: int,
    feature_size: int,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Features of each picture [tokens, H], whole on every rank of `group`, whose ranks encode a
    share each.

    Differentiable: backward takes this rank's share of the gradient, which must be equal on all
    ranks of the group, so the tower's parameter gradients are parts of a sum over the group
    (`sum_tower_gradients`).
    """
    num_tokens = [t * h * w // merge_size**2 for t, h, w in grids]
    # A picture's cost grows with its patches and, by attention within a frame, with their square.
    costs = [t * h * w * (1.0 + h * w / 4096.0) for t, h, w in grids]
    shares = split_by_cost(costs, group.size())
    mine = shares[group.rank()]
    reference = patches[0]
    if mine:
        local = encode(torch.cat([patches[i] for i in mine]), [grids[i] for i in mine])
    else:
        local = reference.new_zeros(0, feature_size)
    sizes = [sum(num_tokens[i] for i in share) for share in shares]
    gathered = _GatherShares.apply(local, sizes, group)
    order = [i for share in shares for i in share]
    pieces = gathered.split([num_tokens[i] for i in order])
    features: list[Tensor] = [reference] * len(grids)
    for index, piece in zip(order, pieces, strict=True):
        features[index] = piece
    return features


class _GatherShares(torch.autograd.Function):
    """All-gather of rows of unequal counts; backward hands each rank the rows it gave."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.start, ctx.count = sum(sizes[: group.rank()]), sizes[group.rank()]
        if group.size() == 1:
            return local.clone()
        longest = max(sizes)
        padded = local.new_zeros(longest, local.size(1))
        padded[: ctx.count] = local
        everything = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(everything, padded, group=group)
        return torch.cat([rows[:size] for rows, size in zip(everything, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.start : ctx.start + ctx.count].contiguous(), None, None


def put_features(embeddings: Tensor, vision_index: Tensor, features: Tensor) -> Tensor:
    """Replaces rows `vision_index` [M] of embeddings [T, 1, H] by features [M, H]; gradients reach
    both.
    """
    return embeddings.index_copy(0, vision_index, features.unsqueeze(1).to(embeddings.dtype))
