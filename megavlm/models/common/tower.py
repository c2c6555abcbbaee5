"""What every family's vision tower offers."""

from collections.abc import Sequence

from torch import Tensor, nn

from megavlm.models.common.vision_merge import Grid


class Tower(nn.Module):
    """Called with patches [P, patch] of all pictures and their grids; gives features
    [P / merge_size^2, feature_size], picture after picture. `merger` is its last part.
    """

    merge_size: int
    feature_size: int
    merger: nn.Module

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        raise AssertionError("a family defines its tower")
