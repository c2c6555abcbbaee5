"""Order in which a recurrence runs through a pack of trees. A segment starts from the final state
of its parent, and a convolution looks back along each token's path.

The order is computed from a pack's layout on the host, once for all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megavlm.models.common.pack_layout import PackLayout


@dataclass(frozen=True)
class Level:
    """The n segments of one depth, concatenated, with l tokens in all."""

    token_index: Tensor | None  # [l] pack index of each token; None for the unchanged pack
    bounds: Tensor  # [n + 1] int64, first token of each segment, then l
    host_bounds: Tensor  # the same on the host
    parents: Tensor | None  # [n] index of each segment's parent in the previous level; None: roots


@dataclass(frozen=True)
class TreeScan:
    """Levels of a pack of T tokens, roots first, and the taps of a convolution over W tokens.

    Example: segments of 3, 1 and 2 tokens, of which the first is the parent of the others, have
    levels of 3 and 3 tokens, and for W = 3 the taps [[6, 0, 1, 2, 2, 4], [6, 6, 0, 1, 1, 2]].
    """

    taps: Tensor  # [W - 1, T] pack index of the 1st, 2nd, .. token before each, T if there is none
    levels: tuple[Level, ...]
    order: Tensor | None  # [T] index of each token among the levels' tokens; None: pack order


def tree_scan(layout: PackLayout, width: int) -> TreeScan:
    """Return the scan of a pack, created on first use. `width`: W, the same for all layers."""
    if layout.tree_scan is None:
        device = layout.token_index.device
        layout.tree_scan = make_tree_scan(layout.parents, layout.segment_bounds, width, device)
    scan: TreeScan = layout.tree_scan
    assert len(scan.taps) == width - 1, "all convolutions of a model have one width"
    return scan


def make_tree_scan(
    parents: Sequence[int],
    segment_bounds: Sequence[int],
    width: int,
    device: torch.device | str = "cpu",
) -> TreeScan:
    """Return the scan of segments (`parents` and `segment_bounds` as in Pack) on `device`."""
    levels = _levels(parents, segment_bounds, device)
    order = None
    if len(levels) > 1:
        # The inverse of the levels' concatenation puts their outputs back in pack order.
        index = [level.token_index for level in levels if level.token_index is not None]
        order = torch.cat(index).argsort()
    return TreeScan(_taps(parents, segment_bounds, width - 1).to(device), levels, order)


def _taps(parents: Sequence[int], bounds: Sequence[int], count: int) -> Tensor:
    total = bounds[-1]
    # Within a segment, the tap is the token before. The first `count` tokens of a segment look into
    # their parent's path, which need not be the tokens before them in the pack.
    taps = torch.arange(total) - torch.arange(1, count + 1)[:, None]
    tails: list[list[int]] = []  # the last tokens of each segment's path, newest first
    for segment, parent in enumerate(parents):
        first, end = bounds[segment], bounds[segment + 1]
        before = tails[parent] if parent >= 0 else []
        before = [*before, *[total] * (count - len(before))]
        for index in range(min(count, end - first)):  # tokens that look back beyond the segment
            taps[index:, first + index] = torch.tensor(before[: count - index])
        tails.append([*range(end - 1, max(first, end - count) - 1, -1), *before][:count])
    return taps


def _levels(
    parents: Sequence[int], bounds: Sequence[int], device: torch.device | str
) -> tuple[Level, ...]:
    # Segments of one depth do not depend on each other, so that one call of the kernel runs them
    # all; the number of calls is the depth of the tree, and not the number of its segments. Parents
    # come before their children, so one pass over `parents` finds every depth.
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    levels: list[Level] = []
    place: dict[int, int] = {}  # segment of the previous level -> its place there
    for depth in range(max(depths) + 1):
        members = [segment for segment, its_depth in enumerate(depths) if its_depth == depth]
        index = torch.cat([torch.arange(*bounds[segment : segment + 2]) for segment in members])
        sizes = (bounds[segment + 1] - bounds[segment] for segment in members)
        host_bounds = torch.tensor([*accumulate(sizes, initial=0)])
        parent_places = torch.tensor([place[parents[segment]] for segment in members if depth])
        levels.append(
            Level(
                token_index=index.to(device) if max(depths) else None,
                bounds=host_bounds.to(device),
                host_bounds=host_bounds,
                parents=parent_places.to(device) if depth else None,
            )
        )
        place = {segment: number for number, segment in enumerate(members)}
    return tuple(levels)
