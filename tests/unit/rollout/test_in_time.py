"""Partial rollouts ahead of training: which groups a step trains on, and which may wait."""

import math

from hypothesis import given
from hypothesis import strategies as st

from megavlm.rollout.ahead.in_time import Deadlines


def test_a_slow_group_waits_until_it_would_be_too_old() -> None:
    deadlines = Deadlines(staleness=2, per_step=2)
    assert deadlines.choose([0, 0, 0, 0], [True, False, True, True], 2, 0) == [0, 2]
    # One of version 0 may wait for step 2.
    assert deadlines.choose([0, 0, 1, 1], [False, True, True, False], 2, 1) == [1, 2]
    assert deadlines.choose([0, 1, 1, 2], [False, True, True, True], 2, 2) == []
    assert deadlines.choose([0, 1, 1, 2], [True, True, True, True], 2, 2) == [0, 1]


def test_as_many_wait_as_a_later_step_trains_on() -> None:
    deadlines = Deadlines(staleness=1, per_step=2)
    assert deadlines.choose([0, 0, 0], [True, False, True], 2, 0) == [0, 2]
    # Three would be left for step 1, which trains on two.
    assert deadlines.choose([0, 0, 0, 0, 1], [False, False, False, True, True], 2, 0) == []


def test_groups_that_are_too_old_do_not_stop_a_step() -> None:
    """After a resume with a lower max_staleness they are dropped once they are played."""
    deadlines = Deadlines(staleness=1, per_step=1)
    assert deadlines.choose([0, 0, 0], [True, False, False], 1, 5) == [0]


@given(st.data())
def test_no_group_is_too_old_lost_or_waited_for_without_end(data: st.DataObject) -> None:
    """Groups are played in any order, steps take them in one or several rounds."""
    staleness = data.draw(st.integers(1, 4))
    per_step = data.draw(st.integers(1, 5))
    factor = data.draw(st.floats(1.0, staleness + 1.0, exclude_min=True))
    deadlines = Deadlines(staleness, per_step)
    versions: list[int] = []
    played: list[bool] = []
    for step in range(8):
        for number in range(1 + data.draw(st.integers(0, 2))):  # dynamic sampling
            wanted = data.draw(st.integers(1, per_step)) if number else per_step
            added = wanted if step or number else math.ceil(factor * per_step)
            versions, played = [*versions, *[step] * added], [*played, *[False] * added]
            while not (chosen := deadlines.choose(versions, played, wanted, step)):
                waiting = [i for i, is_played in enumerate(played) if not is_played]
                assert waiting, "it waits for nothing"
                played[data.draw(st.sampled_from(waiting))] = True
            assert len(set(chosen)) == wanted and all(played[i] for i in chosen)
            assert all(step - versions[i] <= staleness for i in chosen)
            left = [i for i in range(len(versions)) if i not in chosen]
            versions, played = [versions[i] for i in left], [played[i] for i in left]
        assert all(step - version < staleness for version in versions), "too old in the next step"
