"""Spreading images over ranks: the same features and gradients as one rank, each image encoded
once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megavlm.data.videos import Grid
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_merge import encode_images, split_by_cost
from tests.distributed.fork import launch

GRIDS: list[Grid] = [(1, 4, 6), (1, 2, 2), (2, 2, 4)]
PATCH, FEATURE, MERGE = 5, 3, 2


@given(
    st.lists(st.floats(1, 100), max_size=20),
    st.integers(1, 5),
)
def test_split_keeps_every_image_and_balances(costs: list[float], num_parts: int) -> None:
    parts = split_by_cost(costs, num_parts)
    assert sorted(index for part in parts for index in part) == list(range(len(costs)))
    loads = [sum(costs[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs, default=0) + 1e-9


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
    features = encode_images(
        tower,
        patches,
        GRIDS,
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
