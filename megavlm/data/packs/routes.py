"""Routes: the experts to which a rollout server has sent each token, in every layer."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes of t tokens. A token of padding has none, and neither has the last token of a
    sequence: the server ends before it computes that one.
    """

    experts: Tensor  # [t, layers, top-k] uint8 or int16; 0 in layers without experts
    is_known: Tensor  # [t] bool: whether the token has routes

    def select(self, index: Tensor | slice) -> "Routes":
        """Return the routes of the tokens that `index` selects."""
        return Routes(self.experts[index], self.is_known[index])

    def padded(self, count: int) -> "Routes":
        """Return the routes with `count` tokens of padding after them."""
        experts = pad(self.experts, (0, 0, 0, 0, 0, count))
        return Routes(experts, pad(self.is_known, (0, count)))

    def to(self, device: torch.device | str) -> "Routes":
        """Return the same routes on `device`."""
        return Routes(self.experts.to(device), self.is_known.to(device))
