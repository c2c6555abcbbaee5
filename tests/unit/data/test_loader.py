"""The order of rows: complete epochs, the seed's own, and exactly resumed."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.data.loader import RowStream, fingerprint
from megavlm.data.rows import Row, Video


def make_rows(count: int) -> list[Row]:
    return [Row(i, f"q{i}", "a", (b"png",), "t", f"file:{i}") for i in range(count)]


@given(st.integers(1, 20), st.lists(st.integers(0, 50), max_size=8))
def test_every_epoch_holds_every_row_once(num_rows: int, takes: list[int]) -> None:
    stream = RowStream(make_rows(num_rows), seed=0)
    seen: list[int] = []
    for n in takes:
        taken = stream.take(n)
        assert len(taken) == n
        seen += taken
    for start in range(0, len(seen) - num_rows + 1, num_rows):
        assert sorted(seen[start : start + num_rows]) == list(range(num_rows))


def test_epochs_and_seeds_have_their_own_orders() -> None:
    rows = make_rows(50)
    stream = RowStream(rows, seed=0)
    first, second = stream.take(50), stream.take(50)
    assert first != second
    assert RowStream(rows, seed=0).take(50) == first
    assert RowStream(rows, seed=1).take(50) != first


@given(st.integers(1, 20), st.integers(0, 50), st.integers(0, 50))
def test_resume_is_exact(num_rows: int, before: int, after: int) -> None:
    rows = make_rows(num_rows)
    stream = RowStream(rows, seed=3)
    stream.take(before)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = stream.take(after)
    resumed = RowStream(rows, seed=3)
    resumed.take(7)
    resumed.load_state_dict(state)
    assert resumed.take(after) == expected


def test_other_data_or_seed_is_refused() -> None:
    rows = make_rows(4)
    state = RowStream(rows, seed=0).state_dict()
    for other in (rows[:3], rows[::-1], [*rows[:3], replace(rows[3], images=(b"else",))]):
        with pytest.raises(ValueError, match=r"data\.train_files: the checkpoint was made with"):
            RowStream(other, seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match=r"run\.seed: 1, but the checkpoint was made with 0"):
        RowStream(rows, seed=1).load_state_dict(state)


def test_fingerprint_is_of_the_content_not_of_the_place() -> None:
    rows = make_rows(2)
    moved = [replace(row, source=f"elsewhere:{row.index}") for row in rows]
    assert fingerprint(rows) == fingerprint(moved)
    shifted = [replace(rows[0], problem="q", answer="0a"), rows[1]]
    assert fingerprint(rows) != fingerprint(shifted)


def test_fingerprint_sees_frames_and_their_time() -> None:
    rows = make_rows(1)
    video = Video((b"1", b"2"), 2.0)
    others = (video, Video((b"1", b"2"), 4.0), Video((b"12", b""), 2.0))
    prints = {fingerprint([replace(rows[0], videos=(other,))]) for other in others}
    assert len(prints | {fingerprint(rows)}) == 4


def test_no_rows_is_a_users_mistake() -> None:
    with pytest.raises(ValueError, match=r"data\.train_files: there are no rows"):
        RowStream([], seed=0)
