"""Sums and scans over sequences, and that a cut sequence's sum is that of its parts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megavlm.algorithms.segments import (
    discounted_sums,
    next_in_sequence,
    segment_mean,
    segment_sum,
)
from tests.unit.algorithms.literal import ROW, row

IDS = torch.tensor(ROW.ids)
VALUES = ROW.draw(0)


def test_sums_and_means() -> None:
    sums = segment_sum(row(VALUES), IDS, ROW.num)
    means = segment_mean(row(VALUES), IDS, ROW.num)
    for sequence, places in enumerate(ROW.sequences()):
        expected = sum(VALUES[place] for place in places)
        assert sums[sequence].item() == pytest.approx(expected)
        assert means[sequence].item() == pytest.approx(expected / max(len(places), 1))


@pytest.mark.parametrize("function", [segment_sum, segment_mean])
def test_of_two_parts_that_are_added_up(function: Callable[..., Tensor]) -> None:
    whole = function(row(VALUES), IDS, ROW.num)
    given: list[Tensor] = []  # what each of two ranks hands to the all-reduce

    def note(tensor: Tensor) -> Tensor:
        given.append(tensor.clone())
        return tensor

    for part in (slice(0, 6), slice(6, None)):
        function(row(VALUES)[part], IDS[part], ROW.num, note)
    reduced = function(row(VALUES)[:6], IDS[:6], ROW.num, lambda _: given[0] + given[1])
    torch.testing.assert_close(reduced, whole)


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_scans_equal_loops(discount: float) -> None:
    sums = discounted_sums(row(VALUES), IDS, discount)
    following = next_in_sequence(row(VALUES), IDS)
    for places in ROW.sequences():
        carried = 0.0
        after = 0.0
        for place in reversed(places):
            carried = VALUES[place] + discount * carried
            assert sums[place].item() == pytest.approx(carried)
            assert following[place].item() == after
            after = VALUES[place]


def test_no_tokens() -> None:
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert discounted_sums(empty, none, 1.0).shape == (0,)
    assert next_in_sequence(empty, none).shape == (0,)
    assert segment_mean(empty, none, 2).tolist() == [0.0, 0.0]
