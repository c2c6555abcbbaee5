"""Shuffled epochs that touch few blocks at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.data.tables import row_order
from megavlm.data.tables.row_order import DataSetOrder, RowSampler, epoch_order


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 3), st.integers(1, 40))
def test_an_epoch_is_a_permutation(rows: list[int], epoch: int, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_order, "WINDOW_BYTES", window)
        drawn = epoch_order(rows, rows, seed=0, epoch=epoch)
    assert sorted(drawn.tolist()) == list(range(sum(rows)))


def test_large_data_is_drawn_a_few_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_order, "WINDOW_BYTES", 300)
    rows, size = [10] * 20, [100] * 20
    drawn = epoch_order(rows, size, seed=0, epoch=0) // 10
    windows = [set(drawn[start : start + 30].tolist()) for start in range(0, 200, 30)]
    assert [len(window) for window in windows] == [3] * 6 + [2]
    assert len(set.union(*windows)) == 20
    assert windows[0] != {0, 1, 2}, "blocks are shuffled, too"
    again = epoch_order(rows, size, seed=0, epoch=1) // 10
    assert not np.array_equal(drawn, again)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(0, 60), st.integers(0, 20))
def test_draws_resume_exactly_and_keep_shares(weights: list[float], n: int, more: int) -> None:
    def make() -> RowSampler:
        return RowSampler(
            [DataSetOrder(100 * i, [3, 4], [1, 1], 5) for i in range(len(weights))], weights
        )

    draws = make()
    drawn = [next(draws) for _ in range(n)]
    again = make()
    again.load_state_dict(draws.state_dict())
    assert [next(draws) for _ in range(more)] == [next(again) for _ in range(more)]
    for i, weight in enumerate(weights):
        share = weight / sum(weights) * n
        assert abs(sum(index // 100 == i for index in drawn) - share) <= len(weights)
