"""Geometry of the vision towers, exactly transformers', over many grids at the released sizes."""

import pytest
import torch

from megavlm.data.media.image_processing import Grid
from megavlm.models.common.vision_layers import (
    Segments,
    inverse_order,
    merge_order,
    pack_orders,
    pack_values,
    patch_positions,
)
from megavlm.models.qwen2_5_vl.vision import cell_order, patch_order, window_lengths
from megavlm.models.qwen3_vl.vision import table_taps, table_weights
from megavlm.parallel.torchvision_ops import define_torchvision_operators

define_torchvision_operators()
from transformers import vision_utils  # noqa: E402

pytestmark = pytest.mark.parity

MERGE = 2
SIDES = (2, 4, 6, 8, 14, 16, 18, 32, 48, 50, 98)
GRIDS: list[Grid] = [(1 + (h + w) % 3, h, w) for h in SIDES for w in SIDES]
DEVICE = torch.device("cpu")


def test_positions() -> None:
    ours = pack_values(GRIDS, lambda h, w: patch_positions(h, w, MERGE))
    assert torch.equal(ours, vision_utils.get_vision_position_ids(torch.tensor(GRIDS), MERGE))


@pytest.mark.parametrize("side", [48, 7])
def test_interpolation_of_the_position_table(side: int) -> None:
    taps, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor(GRIDS), side, mode="bilinear", align_corners=True, spatial_merge_size=MERGE
    )
    assert torch.equal(pack_values(GRIDS, lambda h, w: table_taps(h, w, MERGE, side)), taps)
    assert torch.equal(pack_values(GRIDS, lambda h, w: table_weights(h, w, MERGE, side)), weights)


def test_windows() -> None:
    window = 112 // MERGE // 14
    cells, bounds = vision_utils.get_vision_window_index(torch.tensor(GRIDS), MERGE, 112, 14)
    order = pack_orders(GRIDS, lambda h, w: cell_order(h, w, MERGE, window))
    assert torch.equal(order, cells)
    patches = pack_orders(GRIDS, lambda h, w: patch_order(h, w, MERGE, window))
    assert torch.equal(patches.view(-1, MERGE**2) // MERGE**2, cells[:, None].expand(-1, 4))
    assert torch.equal(inverse_order(patches)[patches], torch.arange(patches.numel()))

    segments = Segments.pack(GRIDS, lambda h, w: window_lengths(h, w, MERGE, window), DEVICE)
    check_segments(segments, bounds)


def test_frames() -> None:
    check_segments(
        Segments.frames(GRIDS, DEVICE), vision_utils.get_vision_cu_seqlens(torch.tensor(GRIDS))
    )


def check_segments(segments: Segments, bounds: torch.Tensor) -> None:
    """Each segment is the run of patches between two bounds, and `inverse` undoes the grouping."""
    starts, ends = [], []
    for group in segments.groups:
        assert torch.equal(group, group[:, :1] + torch.arange(group.size(1)))
        starts.append(group[:, 0])
        ends.append(group[:, -1] + 1)
    assert torch.equal(torch.cat(starts).sort().values, bounds[:-1].long())
    assert torch.equal(torch.cat(ends).sort().values, bounds[1:].long())
    together = torch.cat([group.flatten() for group in segments.groups])
    assert torch.equal(together[segments.inverse], torch.arange(together.numel()))


def test_merge_order_puts_a_cell_in_a_row() -> None:
    frame = torch.arange(4 * 6).view(4, 6)
    expected = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert merge_order(frame, MERGE).tolist() == expected + [i + 12 for i in expected]
