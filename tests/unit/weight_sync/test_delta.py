"""Deltas restore every number bit by bit, in the form with the fewest bytes."""

import pytest
import torch

from megavlm.inference.server_support import megavlm_delta
from megavlm.inference.server_support.megavlm_delta import (
    encode,
    from_bits,
    restore,
    to_bits,
    to_gaps,
    to_positions,
    write,
)


@pytest.mark.parametrize(
    ("share", "form"), [(0.0, "gaps"), (1e-4, "gaps"), (0.03, "gaps"), (0.3, "bits"), (1, "whole")]
)
def test_a_delta_restores_the_new_bytes(
    share: float, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several segments, the last of odd size, and of a rest that was not compared."""
    monkeypatch.setattr(megavlm_delta, "SEGMENT", 30_001)
    generator = torch.Generator().manual_seed(1)
    base = torch.randint(-100, 100, (100_003,), generator=generator).to(torch.int16)
    new = base + (torch.rand(len(base), generator=generator) < share).to(torch.int16)
    rest = torch.arange(7, dtype=torch.uint8)
    bucket = torch.cat([new.view(torch.uint8), rest])
    written = torch.full_like(bucket, 77)
    parts, changed = write(bucket, base, written)
    held = torch.cat([base.view(torch.uint8), torch.zeros(7, dtype=torch.uint8)])
    size = sum(part.nbytes for part in parts)
    restore(parts, written[:size].clone(), held)
    assert torch.equal(held, bucket)
    assert [part.form for part in parts] == [form] * 4 + ["whole"] and size <= len(bucket)
    assert changed == int((new != base).sum())
    if form == "gaps":  # a byte each, one for every 255 numbers at most, and padding
        assert size <= 3 * changed + len(base) // 255 + 1 + 2 * 4 + len(rest)


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
    old = torch.tensor([float("nan"), 0.0, 1.0]).bfloat16().view(torch.int16)
    new = torch.tensor([float("nan"), -0.0, 1.0]).bfloat16().view(torch.int16)
    assert encode(new, old).changed == 1
