"""The buffer of groups: what may start, what a step trains on, and what waits for a later one."""

import math
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megavlm.rollout.buffer import GroupBuffer, Started, StreamBatch, Window


def started(buffer: GroupBuffer[int], first: int = 0) -> list[Started[int]]:
    """Start all that is allowed; new groups are numbered from `first`."""
    waiting, new = buffer.allow()
    version = buffer.version or 0
    return [buffer.start(group, version) for group in [*waiting, *range(first, first + new)]]


def play(buffer: GroupBuffer[int], *items: Started[int], has_signal: bool = True) -> None:
    for item in items:
        buffer.played(item, item.version, 10, has_signal)


def begun(**window: Any) -> tuple[GroupBuffer[int], list[Started[int]]]:
    buffer: GroupBuffer[int] = GroupBuffer(Window(**{"per_step": 2} | window))
    buffer.begin(0)
    return buffer, started(buffer)


def groups(streamed: StreamBatch[int] | None) -> list[int]:
    assert streamed is not None
    return list(streamed.groups)


def test_a_step_waits_for_the_first_prompts_that_were_drawn() -> None:
    buffer, items = begun(steps_started=2.0, staleness=1)
    assert len(items) == 4
    play(buffer, items[0], items[2], items[3])
    assert buffer.take() is None
    play(buffer, items[1])
    assert buffer.take() == StreamBatch([0, 1], [0, 1])
    buffer.begin(1)
    assert [item.group for item in started(buffer, 4)] == [4, 5], "one step more"
    assert groups(buffer.take()) == [2, 3]


def test_a_wave_has_enough_tokens_and_its_places() -> None:
    buffer, items = begun(per_step=4)
    play(buffer, items[2])
    assert buffer.take(11) is None and buffer.take(10) == StreamBatch([2], [2], is_last=False)
    play(buffer, items[3], items[0])
    assert buffer.take(20) == StreamBatch([0, 3], [0, 3], is_last=False)
    play(buffer, items[1])
    assert buffer.take(20) == StreamBatch([1], [1])


def test_a_group_that_is_due_keeps_its_place_while_it_plays() -> None:
    """The example in `GroupBuffer._leaves_room`."""
    buffer: GroupBuffer[str] = GroupBuffer(Window(per_step=2, staleness=1, order="oldest"))
    buffer.begin(5)
    a, b, c = (buffer.start(group, version) for group, version in (("A", 4), ("B", 4), ("C", 5)))
    buffer.played(a, 4, 10, has_signal=True)
    buffer.played(c, 5, 10, has_signal=True)
    assert buffer.take() is None and buffer.take(10) == StreamBatch(["A"], [0], is_last=False)
    buffer.played(b, 4, 10, has_signal=True)
    assert buffer.take() == StreamBatch(["B"], [1])


def test_a_slow_group_waits_until_it_would_be_too_old() -> None:
    buffer, items = begun(steps_started=2.0, staleness=2, order="oldest")
    play(buffer, items[0], items[2], items[3])
    assert groups(buffer.take()) == [0, 2]
    buffer.begin(1)
    items += started(buffer, 4)
    play(buffer, items[4])
    assert groups(buffer.take()) == [3, 4], "the one of version 0 may wait for step 2"
    buffer.begin(2)
    items += started(buffer, 6)
    play(buffer, items[5], items[6])
    assert buffer.take() is None
    assert groups(buffer.take(1)) == [5], "a batch leaves room for it"
    play(buffer, items[1])
    assert buffer.take() == StreamBatch([1], [1])


def test_as_many_wait_as_a_later_step_trains_on() -> None:
    buffer, items = begun(steps_started=2.0, staleness=1, order="oldest")
    play(buffer, *items[:2])
    assert groups(buffer.take()) == [0, 1]
    buffer.begin(1)
    more = started(buffer, 4)
    play(buffer, *more)
    assert buffer.take() is None, "both of version 0 are due"
    play(buffer, *items[2:])
    assert groups(buffer.take()) == [2, 3]


@pytest.mark.parametrize("requeue", [False, True])
def test_a_lost_group_is_replaced_and_may_be_asked_again_in_a_later_step(requeue: bool) -> None:
    buffer, items = begun(requeue=requeue)
    buffer.lose(items[0], 0)
    (more,) = started(buffer, 2)
    play(buffer, items[1], more)
    assert groups(buffer.take()) == [1, 2] and buffer.take_counts() == (0, 1)
    assert buffer.state() == [0] * requeue
    buffer.begin(1)
    assert buffer.allow() == ([0] * requeue, 2 - requeue)


def test_the_groups_that_a_step_loses_are_counted() -> None:
    buffer, items = begun()
    assert [buffer.lose(item, item.group) for item in items] == [1, 2]
    assert buffer.lose(started(buffer, 2)[0], 2) == 3
    assert buffer.take_counts() == (0, 3) and buffer.take_counts() == (0, 0)


def test_rounds_replace_groups_without_signal() -> None:
    buffer, items = begun(per_step=3, rounds=1)
    play(buffer, items[0], items[2], has_signal=False)
    play(buffer, items[1])
    assert buffer.take(1) == StreamBatch([1], [1], is_last=False)
    more = started(buffer, 3)
    assert len(more) == 2, "only what is missing"
    play(buffer, more[0])
    play(buffer, more[1], has_signal=False)
    # The last place has the first of those without signal.
    assert buffer.take() == StreamBatch([3, 0], [0, 2], left_out=(2, 4))


def test_no_round_is_made_that_is_not_needed() -> None:
    buffer, items = begun(rounds=3)
    play(buffer, *items)
    assert buffer.take() == StreamBatch([0, 1], [0, 1])
    assert buffer.allow() == ([], 0)


class Steps(RuleBasedStateMachine):
    """Steps take groups while others are played or lost, in any order, and runs that resume."""

    @initialize(data=st.data())
    def begins(self, data: st.DataObject) -> None:
        staleness = data.draw(st.integers(0, 3))
        is_oldest = staleness > 0 and data.draw(st.booleans())
        most = staleness + 1.0
        self.window = Window(
            per_step=data.draw(st.integers(1, 4)),
            steps_started=data.draw(st.floats(1.0, most)) if is_oldest else most,
            staleness=staleness,
            order="oldest" if is_oldest else "drawn",
            rounds=data.draw(st.integers(0, 2)),
            requeue=data.draw(st.booleans()),
        )
        self.buffer: GroupBuffer[int] = GroupBuffer(self.window)
        self.version, self.dropped, self.seen = -1, 0, 0
        self.playing: dict[int, Started[int]] = {}
        self.versions: dict[int, int] = {}
        self.trained, self.lost = list[int](), list[int]()
        self.next_step()

    def next_step(self) -> None:
        self.version, self.indices, self.num_lost = self.version + 1, list[int](), 0
        self.buffer.begin(self.version)
        self.start()

    def start(self) -> None:
        waiting, new = self.buffer.allow()
        for group in [*waiting, *range(self.seen, self.seen + new)]:
            self.versions[group] = self.version
            self.playing[group] = self.buffer.start(group, self.version)
        self.seen += new

    @precondition(lambda self: self.playing)
    @rule(data=st.data())
    def plays(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.playing)))
        has_signal = data.draw(st.booleans())
        self.buffer.played(self.playing.pop(group), self.versions[group], 5, has_signal)
        self.start()

    @precondition(lambda self: self.playing and self.num_lost < self.window.per_step)
    @rule(data=st.data())
    def loses(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.playing)))
        self.buffer.lose(self.playing.pop(group), group)
        self.num_lost += 1
        assert (group in self.buffer.state()) == self.window.requeue
        self.lost += [] if self.window.requeue else [group]
        self.start()

    @rule(least_tokens=st.sampled_from([None, 1, 12]), resumes=st.booleans())
    def takes(self, least_tokens: int | None, resumes: bool) -> None:
        streamed = self.buffer.take(least_tokens)
        self.start()
        if streamed is None:
            assert self.playing, "it waits for nothing"
            return
        ages = [
            self.version - self.versions[group] for group in [*streamed.groups, *streamed.left_out]
        ]
        assert max(ages, default=0) <= self.window.staleness
        self.trained += [*streamed.groups, *streamed.left_out]
        self.indices += streamed.indices
        if not streamed.is_last:
            assert least_tokens is not None and 5 * len(streamed.groups) >= least_tokens
            return
        assert sorted(self.indices) == [*range(self.window.per_step)]
        self.dropped += self.buffer.take_counts()[0]
        known = [*self.trained, *self.lost, *self.buffer.state()]
        assert len({*known}) == len(known) == self.seen - self.dropped, "lost, or taken twice"
        if resumes:
            state, self.buffer, self.playing = self.buffer.state(), GroupBuffer(self.window), {}
            self.buffer.load(state)
        self.next_step()

    @invariant()
    def starts_no_more_than_it_may(self) -> None:
        if self.window.rounds == 0:
            most = math.ceil(self.window.steps_started * self.window.per_step)
            assert len(self.buffer.state()) <= most + self.num_lost - len(self.indices)


TestSteps = Steps.TestCase
