"""Image features: each distinct image is encoded once, with images spread over the ranks of the
tensor and context axes, then put in place of its tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.data.videos import Grid
from megavlm.models.common.tower import Tower


def split_by_cost(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Split indices into parts of similar cost, the costliest first, each to the cheapest part so
    far. The same on every rank.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0.0] * num_parts
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += costs[index]
    return [sorted(part) for part in parts]


def encode_images(
    tower: Tower,
    patches: Sequence[Tensor],
    grids: Sequence[Grid],
    *,
    group: dist.ProcessGroup,
    context_group: dist.ProcessGroup,
) -> list[Tensor]:
    """Encode images, a share on each rank of `group`: the tensor and context axes together. Returns
    the features of each image [tokens, (1 + levels) x H] on every rank. Collective over `group`.

    Differentiable. The gradient of the features is whole on the ranks of the tensor axis, but each
    rank of the context axis has that of its own tokens: backward sums over it, then takes the share
    that this rank encoded. So the tower's parameter gradients are parts of a sum over the group
    (data parallelism sums over context ranks, `sum_tower_gradients` over tensor ranks).
    """
    num_tokens = [t * h * w // tower.merge_size**2 for t, h, w in grids]
    # An image's cost grows with its patches and, by attention within a frame, with their square.
    costs = [t * h * w * (1.0 + h * w / 4096.0) for t, h, w in grids]
    shares = split_by_cost(costs, group.size())
    mine = shares[group.rank()]
    reference = patches[0]
    if mine:
        local = tower(torch.cat([patches[i] for i in mine]), [grids[i] for i in mine])
    else:
        # Backward is collective, so this rank takes part in it, too.
        width = tower.feature_size * (1 + tower.num_levels)
        local = reference.new_zeros(0, width, dtype=next(tower.parameters()).dtype)
        local.requires_grad_(torch.is_grad_enabled())
    sizes = [sum(num_tokens[i] for i in share) for share in shares]
    gathered = _GatherShares.apply(local, sizes, group, context_group)
    order = [i for share in shares for i in share]
    pieces = gathered.split([num_tokens[i] for i in order])
    features: list[Tensor] = [reference] * len(grids)
    for index, piece in zip(order, pieces, strict=True):
        features[index] = piece
    return features


class _GatherShares(torch.autograd.Function):
    """All-gather of unequal numbers of rows; in backward a rank receives the whole gradient of its
    own rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        sizes: list[int],
        group: dist.ProcessGroup,
        context_group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.start, ctx.count = sum(sizes[: group.rank()]), sizes[group.rank()]
        ctx.context_group = context_group
        if group.size() == 1:
            return local.clone()
        longest = max(sizes)
        padded = local.new_zeros(longest, local.size(1))
        padded[: ctx.count] = local
        everything = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(everything, padded, group=group)
        return torch.cat([rows[:size] for rows, size in zip(everything, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0].contiguous()
        if ctx.context_group.size() > 1:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.context_group)
        return grad[ctx.start : ctx.start + ctx.count], None, None, None


def put_features(embeddings: Tensor, vision_index: Tensor, features: Tensor) -> Tensor:
    """Replace rows `vision_index` [m] of embeddings [t, 1, H] by features [m, H]. Gradients reach
    both.
    """
    return embeddings.index_copy(0, vision_index, features.unsqueeze(1).to(embeddings.dtype))
