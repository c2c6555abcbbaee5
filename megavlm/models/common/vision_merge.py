"""Image features. Each distinct image is encoded once; the images are distributed over the ranks of
the tensor and context axes. The features then replace the embeddings of the image's tokens.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.data.media.image_processing import Grids, ProcessedImage
from megavlm.models.common.tower import Tower


def encode_share(tower: Tower, images: Sequence[ProcessedImage]) -> Tensor:
    """Return the features [tokens, (1 + levels) x H] of this rank's images, image after image."""
    parameter = next(tower.parameters())
    if not images:
        width = tower.feature_size * (1 + tower.num_levels)
        return torch.zeros(0, width, dtype=parameter.dtype, device=parameter.device)
    return tower.encode(images)


def gather_shares(
    tower: Tower,
    local: Tensor,
    grids: Sequence[Grids],
    shares: Sequence[Sequence[int]],
    *,
    group: dist.ProcessGroup,
    context_group: dist.ProcessGroup,
) -> list[Tensor]:
    """Return the features [its tokens, width] of each image on every rank of `group`. Collective
    over `group`.

    local: Features [tokens of the share, width] of this rank's images (`encode_share`).
    grids: Grids of all images.
    shares: Indices of the images that each rank encoded.
    group: The ranks of the tensor and context axes together.
    context_group: The ranks of the context axis.

    Differentiable. Each tensor rank has the whole gradient of the features, but each context rank
    has only the gradient of its own tokens. The backward pass sums over the context axis, then
    selects the share that this rank encoded. The tower's parameter gradients are therefore parts
    of a sum over the group: data parallelism sums over context ranks, `sum_tower_gradients` over
    tensor ranks.
    """
    num_tokens = [count_tokens(parts, tower) for parts in grids]
    if not shares[group.rank()]:
        # The backward pass is collective, so this rank must take part in it, too.
        local.requires_grad_(torch.is_grad_enabled())
    sizes = [sum(num_tokens[i] for i in share) for share in shares]
    gathered = _GatherShares.apply(local, sizes, group, context_group)
    order = [i for share in shares for i in share]
    pieces = dict(zip(order, gathered.split([num_tokens[i] for i in order]), strict=True))
    return [pieces[index] for index in range(len(grids))]


def exchange_shares(
    local: Tensor,
    num_tokens: Sequence[int],
    senders: Sequence[int],
    receivers: Sequence[Collection[int]],
    group: dist.ProcessGroup,
) -> tuple[Tensor, list[int]]:
    """Send the features of each image to the ranks that need them, without padding and without
    gradients. Collective over `group`.

    local: Features [tokens, width] of the images that this rank sends, in their order.
    num_tokens: Number of tokens of each image.
    senders: Rank that sends each image.
    receivers: Ranks that receive each image.

    Returns the features [tokens, width] that this rank receives, and the indices of their images in
    order. Only
    images that this rank sends or receives have to be correct in senders and receivers.
    """
    me, ranks = group.rank(), range(group.size())
    mine = [i for i, sender in enumerate(senders) if sender == me]
    if group.size() == 1:
        return local, mine
    pieces = dict(zip(mine, local.split([num_tokens[i] for i in mine]), strict=True))
    sent = [[i for i in mine if rank in receivers[i]] for rank in ranks]
    wanted = [
        [i for i, sender in enumerate(senders) if sender == rank and me in receivers[i]]
        for rank in ranks
    ]
    # Sent as bytes, since not every backend supports every dtype.
    outgoing = torch.cat([local[:0], *[pieces[i] for items in sent for i in items]])
    order = [i for items in wanted for i in items]
    received = outgoing.new_empty(sum(num_tokens[i] for i in order), local.size(1))
    dist.all_to_all_single(
        received.view(torch.uint8),
        outgoing.view(torch.uint8),
        [sum(num_tokens[i] for i in items) for items in wanted],
        [sum(num_tokens[i] for i in items) for items in sent],
        group=group,
    )
    return received, order


def count_tokens(grids: Grids, tower: Tower) -> int:
    """Return the number of tokens of an image."""
    return sum(t * h * w for t, h, w in grids) // tower.merge_size**2


class _GatherShares(torch.autograd.Function):
    """All-gather of unequal numbers of rows. In the backward pass, a rank receives the whole
    gradient of its own rows.
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
    """Replace rows `vision_index` [m] of embeddings [t, 1, H] by features [m, H]. Differentiable in
    both.
    """
    return embeddings.index_copy(0, vision_index, features.unsqueeze(1).to(embeddings.dtype))
