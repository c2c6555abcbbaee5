"""Spreading images over ranks: the same features and gradients as one rank, each image encoded
once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megavlm.data.media.image_processing import Grid
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_merge import count_tokens, exchange_shares, gather_shares
from tests.support.fork import launch

GRIDS: list[Grid] = [(1, 4, 6), (1, 2, 2), (2, 2, 4)]
PATCH, FEATURE, MERGE = 5, 3, 2


class LinearTower(Tower):
    """The sum of a token's patches times a weight; it remembers what it has encoded."""

    merge_size, feature_size = MERGE, FEATURE

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.seen: list[Grid] = []

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        self.seen.extend(grids)
        return patches.view(-1, MERGE**2, PATCH).sum(1) @ self.weight


def encode(is_context: bool) -> list[Any]:
    """Features, the encoder's gradient on this rank, and the images that this rank encoded.

    Ranks of the tensor axis have the whole loss each, those of the context axis a part.
    """
    weight = nn.Parameter(torch.arange(PATCH * FEATURE, dtype=torch.float32).view(PATCH, FEATURE))
    generator = torch.Generator().manual_seed(1)
    patches = [torch.randn(t * h * w, PATCH, generator=generator) for t, h, w in GRIDS]
    tower = LinearTower(weight)
    group = dist.group.WORLD
    assert group is not None
    alone, _ = dist.new_subgroups(group_size=1)
    shares = [[i for i in range(len(GRIDS)) if i % group.size() == r] for r in range(group.size())]
    share = shares[group.rank()]
    local = torch.zeros(0, FEATURE)
    if share:
        local = tower(torch.cat([patches[i] for i in share]), [GRIDS[i] for i in share])
    features = gather_shares(
        tower,
        local,
        [(grid,) for grid in GRIDS],
        shares,
        group=group,
        context_group=group if is_context else alone,
    )
    mine = [i for i in range(len(GRIDS)) if not is_context or i % group.size() == group.rank()]
    loss = sum((features[i] * (i + 1)).sin().sum() for i in mine) + 0 * features[0].sum()
    assert isinstance(loss, Tensor)
    loss.backward()
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return [torch.cat(features), gradient, np.array(tower.seen).reshape(-1, 3)]


@pytest.mark.parametrize("is_context", [False, True])
def test_features_and_gradients_equal_one_rank(is_context: bool) -> None:
    ((features, gradient, _),) = launch(1, encode, is_context)
    for world_size in (2, 4):  # with four ranks and three images one rank has none
        results = launch(world_size, encode, is_context)
        for result in results:
            np.testing.assert_allclose(result[0], features, rtol=1e-6)
        np.testing.assert_allclose(
            sum(result[1] for result in results), gradient, rtol=1e-4, atol=1e-4
        )
        encoded = np.concatenate([result[2] for result in results])
        assert sorted(map(tuple, encoded.tolist())) == sorted(GRIDS)


def exchanged(senders: list[int], receivers: list[set[int]]) -> dict[int, list[float]]:
    """The first column of what this rank receives, by image. An image's rows hold its number."""
    group = dist.group.WORLD
    assert group is not None
    tower = LinearTower(nn.Parameter(torch.zeros(PATCH, FEATURE)))
    sizes = [count_tokens((grid,), tower) for grid in GRIDS]
    mine = [i for i, sender in enumerate(senders) if sender == group.rank()]
    local = torch.cat(
        [torch.zeros(0, 3).bfloat16(), *[torch.full((sizes[i], 3), i + 1.0) for i in mine]]
    ).bfloat16()
    rows, order = exchange_shares(local, sizes, senders, receivers, group)
    found = dict(zip(order, rows.split([sizes[i] for i in order]), strict=True))
    assert all(len(rows) == sizes[i] and rows.dtype == torch.bfloat16 for i, rows in found.items())
    return {i: rows[:, 0].unique().tolist() for i, rows in found.items()}


def test_features_reach_the_ranks_that_need_them() -> None:
    receivers = [{0, 1, 3}, {0}, {3}]
    results = launch(4, exchanged, [2, 0, 0], receivers)
    for rank, found in enumerate(results):
        assert found == {i: [i + 1.0] for i, ranks in enumerate(receivers) if rank in ranks}
