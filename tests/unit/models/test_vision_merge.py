"""Spreading pictures over ranks: the same features and gradients as one rank, each picture encoded
once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megavlm.models.common.vision_merge import Grid, encode_pictures, split_by_cost
from tests.distributed.fork import launch

GRIDS: list[Grid] = [(1, 4, 6), (1, 2, 2), (2, 2, 4)]
PATCH, FEATURE, MERGE = 5, 3, 2


@given(
    st.lists(st.floats(1, 100), max_size=20),
    st.integers(1, 5),
)
def test_split_keeps_every_picture_and_balances(costs: list[float], num_parts: int) -> None:
    parts = split_by_cost(costs, num_parts)
    assert sorted(index for part in parts for index in part) == list(range(len(costs)))
    loads = [sum(costs[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs, default=0) + 1e-9


def encode() -> list[Any]:
    """Features, the encoder's gradient on this rank, and the pictures that this rank encoded."""
    weight = (
        torch.arange(PATCH * FEATURE, dtype=torch.float32).view(PATCH, FEATURE).requires_grad_()
    )
    generator = torch.Generator().manual_seed(1)
    patches = [torch.randn(t * h * w, PATCH, generator=generator) for t, h, w in GRIDS]
    seen: list[Grid] = []

    def encoder(rows: Tensor, grids: Sequence[Grid]) -> Tensor:
        seen.extend(grids)
        return rows.view(-1, MERGE**2, PATCH).sum(1) @ weight

    group = dist.group.WORLD
    assert group is not None
    features = encode_pictures(
        encoder, patches, GRIDS, merge_size=MERGE, feature_size=FEATURE, group=group
    )
    loss = sum((feature * (i + 1)).sin().sum() for i, feature in enumerate(features))
    assert isinstance(loss, Tensor)
    if seen:  # the gather's backward is no collective: a rank without pictures has nothing to do
        loss.backward()
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return [torch.cat(features), gradient, np.array(seen).reshape(-1, 3)]


def test_features_and_gradients_equal_one_rank() -> None:
    ((features, gradient, _),) = launch(1, encode)
    for world_size in (2, 4):  # with four ranks and three pictures one rank has none
        results = launch(world_size, encode)
        for result in results:
            np.testing.assert_allclose(result[0], features, rtol=1e-6)
        np.testing.assert_allclose(
            sum(result[1] for result in results), gradient, rtol=1e-4, atol=1e-4
        )
        encoded = np.concatenate([result[2] for result in results])
        assert sorted(map(tuple, encoded.tolist())) == sorted(GRIDS)
