"""Adapters of experts that are computed together, against the same adapters expert by expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.models.common.lora_grouped import ExpertRanks, GroupedLoRALinear, grouped_linear
from megavlm.models.common.lora_linear import LoRALinear, LoRAPart, Placement

COLUMNS, ROWS = 8, 12
SIZES = {"all": (3, 1, 4), "one is empty": (3, 0, 5), "one has all": (0, 0, 8), "none": (0, 0, 0)}


class Group:
    """A process group as far as nothing is communicated."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = lambda: size, lambda: rank


class Experts(nn.Module):
    """Transformer Engine's grouped linear layer, in plain torch."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.num_gemms = len(weights)
        for index, weight in enumerate(weights):
            self.register_parameter(f"weight{index}", nn.Parameter(weight, requires_grad=False))

    def forward(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, None]:
        parts = zip(x.split(sizes), self.parameters(), strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in parts]), None


@dataclass
class Both:
    """The same adapters: of all experts together, and one after the other."""

    together: GroupedLoRALinear
    separate: list[LoRALinear]


def both(rank: int, parts: Sequence[str] = ("gate", "up"), first: int = 0) -> Both:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(3)]
    group: Any = Group()
    options: Any = {
        "parts": [LoRAPart(part, ROWS // len(parts), rank, scale=0.3) for part in parts],
        "placement": Placement(None, group),
    }
    ranks: Any = ExpertRanks(Group(4, first // 3), group)
    together = GroupedLoRALinear(Experts(weights), name="experts.fc1", ranks=ranks, **options)
    separate = []
    for index, weight in enumerate(weights):
        base = nn.Linear(COLUMNS, ROWS, bias=False)
        base.weight = nn.Parameter(weight, requires_grad=False)
        separate.append(LoRALinear(base, name=f"experts.{first + index}.fc1", **options))
    for index, layer in enumerate(separate):
        for part, b in layer.lora_B.items():
            nn.init.normal_(b, generator=generator)
            together.lora_B[part].data[index] = b.data
    return Both(together, separate)


@pytest.mark.parametrize("rank", [1, 3, 4])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_expert_by_expert(rank: int, sizes: tuple[int, ...]) -> None:
    layers, tokens = both(rank), sum(sizes)
    x = torch.randn(tokens, COLUMNS, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    output, bias = layers.together(x, sizes)
    assert bias is None
    pieces = zip(y.split(sizes), layers.separate, strict=True)
    expected = torch.cat([layer(rows) for rows, layer in pieces])
    torch.testing.assert_close(output, expected)
    upstream = torch.randn(1, ROWS).expand(tokens, -1)  # as the gradient of a sum is
    for result in (output, expected):
        result.backward(upstream)
    torch.testing.assert_close(x.grad, y.grad)
    for index, layer in enumerate(layers.separate):
        for name, parameter in layer.named_parameters(recurse=False):
            together = layers.together.get_parameter(name)
            assert together.grad is not None and parameter.grad is not None
            torch.testing.assert_close(together.grad[index], parameter.grad)


def test_a_layer_multiplies_all_experts_at_once() -> None:
    layers = both(4)
    with mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as product:
        output, _ = layers.together(torch.randn(8, COLUMNS, requires_grad=True), SIZES["all"])
        assert product.call_count == 2
        output.sum().backward()
    assert product.call_count == 2 + 4


def test_each_expert_has_its_own_name_and_pair() -> None:
    layers = both(3, first=6)
    found = list(layers.together.adapters())
    assert [name for name, _ in found] == [layer.name for layer in layers.separate]
    for (_, adapter), layer in zip(found, layers.separate, strict=True):
        assert adapter.weight.equal(layer.weight) and adapter.parts == layer.parts
        for ours, theirs in zip(adapter.pairs(), layer.pairs(), strict=True):
            assert ours[0] == theirs[0] and ours[1].equal(theirs[1]) and ours[2].equal(theirs[2])
        assert not adapter.weight.equal(adapter.merged_weight())
        assert adapter.merged_weight().equal(layer.merged_weight())


def test_adapters_that_are_off_leave_the_base() -> None:
    layer, x = both(3).together, torch.randn(8, COLUMNS)
    layer.enabled = False
    assert layer(x, SIZES["all"])[0].equal(layer.base(x, SIZES["all"])[0])


def test_a_product_in_half_precision_adds_in_single() -> None:
    x, weights = torch.randn(8, 64).bfloat16(), torch.randn(3, 16, 64).bfloat16()
    ends = torch.tensor(SIZES["all"]).cumsum(0, dtype=torch.int32)
    parts = zip(x.split(SIZES["all"]), weights, strict=True)
    exact = torch.cat([F.linear(rows.double(), weight.double()) for rows, weight in parts])
    torch.testing.assert_close(grouped_linear(x, weights, ends).double(), exact, rtol=2**-8, atol=0)
