"""Routed experts: the experts to which a rollout server has sent each token, in every layer."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """Routed experts of t tokens. A token of padding has none, and neither has the last token of a
    sequence: the server ends before it computes that one.
    """

    experts: Tensor  # [t, layers, top-k] uint8 or int16; 0 in layers without experts
    is_known: Tensor  # [t] bool: whether the token has routed experts

    def select(self, index: Tensor | slice) -> "RoutedExperts":
        """Return the routed experts of the tokens that `index` selects."""
        return RoutedExperts(self.experts[index], self.is_known[index])

    def padded(self, count: int) -> "RoutedExperts":
        """Return the routed experts with `count` tokens of padding after them."""
        experts = pad(self.experts, (0, 0, 0, 0, 0, count))
        return RoutedExperts(experts, pad(self.is_known, (0, count)))

    def to(self, device: torch.device | str) -> "RoutedExperts":
        """Return the same routed experts on `device`."""
        return RoutedExperts(self.experts.to(device), self.is_known.to(device))
