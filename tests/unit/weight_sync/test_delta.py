"""Deltas restore every number bit by bit, in the form with the fewest bytes."""

import pytest
import torch

from megavlm.weight_sync.delta import apply, encode, from_bits, to_bits, to_gaps, to_positions


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize(
    ("share", "form"),
    [(0.0, "gaps"), (1e-4, "gaps"), (0.03, "gaps"), (0.3, "bits"), (1.0, "whole")],
)
def test_a_delta_restores_the_new_numbers(dtype: torch.dtype, share: float, form: str) -> None:
    generator = torch.Generator().manual_seed(1)
    old = torch.randint(0, 100, (100_003,), generator=generator).to(dtype)
    new = old + (torch.rand(len(old), generator=generator) < share).to(dtype)
    delta, held = encode(new, old), old.clone()
    apply(delta, held)
    assert torch.equal(held, new)
    assert delta.form == form and delta.nbytes <= new.nbytes
    count = int((new != old).sum())
    if form == "gaps":  # a byte each, and one for every 255 numbers at most
        assert delta.nbytes <= count * (1 + old.itemsize) + len(old) // 255 + 1


@pytest.mark.parametrize(
    ("positions", "gaps"),
    [
        ([], []),
        ([0], [1]),
        ([253], [254]),
        ([254], [255, 0]),
        ([255], [255, 1]),
        ([2, 300], [3, 255, 43]),
        ([0, 510], [1, 255, 255, 0]),
    ],
)
def test_gaps_at_the_edge_of_a_byte(positions: list[int], gaps: list[int]) -> None:
    found = to_gaps(torch.tensor(positions, dtype=torch.int64))
    assert found.tolist() == gaps and to_positions(found).tolist() == positions


def test_bits_of_a_length_that_is_no_multiple_of_eight() -> None:
    mask = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 0, 1], dtype=torch.bool)
    assert to_bits(mask).tolist() == [137, 2]
    assert from_bits(to_bits(mask)).tolist() == [0, 3, 7, 9]


def test_numbers_are_compared_as_bits() -> None:
    """A NaN that stays is no change, and a zero whose sign changes is one."""
    old = torch.tensor([float("nan"), 0.0, 1.0]).bfloat16()
    new = torch.tensor([float("nan"), -0.0, 1.0]).bfloat16()
    delta, held = encode(new.view(torch.int16), old.view(torch.int16)), old.clone()
    apply(delta, held.view(torch.int16))
    assert len(delta.values) == 1 and torch.equal(held.view(torch.int16), new.view(torch.int16))
