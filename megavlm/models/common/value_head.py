"""The critic's head: a value for each target, from the hidden state that predicts it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ValueHead(nn.Module):
    """hidden [N, H] to values [N] in fp32. Starts at zero, so that an untrained critic says 0.
    `learns_alone`: no gradient goes on to the hidden states.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.learns_alone = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.learns_alone:
            hidden = hidden.detach()
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(1)
