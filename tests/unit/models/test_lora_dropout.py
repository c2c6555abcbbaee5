"""What adapters drop of their input: the same on ranks that hold the same input, otherwise not."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from megavlm.models.common.lora_linear import EXPERT_STREAM, LoRALinear, LoRAPart, Placement
from megavlm.parallel.mesh import Layout, build_mesh
from tests.support.fork import launch

pytestmark = pytest.mark.distributed
TOKENS, COLUMNS, ROWS, CALLS = 2, 4, 8, 4


class Zeros(nn.Module):
    """A linear that gives zeros for so many tokens, so that only the adapters' part is left."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS), requires_grad=False)
        self.tokens = tokens

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x.new_zeros(self.tokens, 1, ROWS), None


def kept(cut: Any, sequence: bool, is_expert: bool) -> tuple[list[int], int]:
    """Per call, which of its input columns this rank keeps of its first token, as the bits of a
    number; the last in eval mode. Outside of adapters its random numbers are not other ranks'.
    """
    mesh = build_mesh(Layout(expert_tensor=2) if is_expert else Layout(tensor=2))
    get_cuda_rng_tracker().add(EXPERT_STREAM, 7)
    torch.rand(1 + 2 * mesh.rank)
    group = mesh.groups.expt_tp if is_expert else mesh.groups.tp
    gathered = sequence and cut == "rows"
    layer = LoRALinear(
        Zeros(TOKENS * (2 if gathered else 1)),
        name="layer",
        parts=[LoRAPart("down", ROWS, rank=1, scale=1.0)],
        placement=Placement(cut, group, sequence, is_expert),
        dropout=0.5,
    )
    nn.init.ones_(layer.lora_B["down"])
    # A rank's columns weigh 1, 2, 4, 8 times a power that tells the ranks' parts of a sum apart.
    shift = COLUMNS * group.rank() if cut == "columns" else 0
    layer.lora_A.data.copy_(2.0 ** torch.arange(shift, shift + COLUMNS))
    token = TOKENS * group.rank() if gathered else 0

    def bits(scale: float) -> int:
        output, _ = layer(torch.ones(TOKENS, 1, COLUMNS))
        return int(output[token, 0, 0].item() * scale) >> shift & 15

    found = [bits(0.5) for _ in range(CALLS)]  # what is kept is doubled
    layer.eval()
    return found, bits(1.0)


@pytest.mark.parametrize(
    ("cut", "sequence", "is_expert", "agree"),
    [
        ("rows", False, False, True),
        ("rows", False, True, True),
        ("rows", True, False, False),
        ("columns", False, False, False),
        ("columns", False, True, False),
    ],
)
def test_ranks_drop_the_same_of_what_they_share(
    cut: str, sequence: bool, is_expert: bool, agree: bool
) -> None:
    (first, first_eval), (second, second_eval) = launch(2, kept, cut, sequence, is_expert)
    assert len(set(first)) > 1
    assert (first == second) == agree
    assert first_eval == second_eval == 15
