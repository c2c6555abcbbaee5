"""State machine of a server: single transitions, and invariants of all sequences of events."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.inference.server_pool.state import (
    LEFT,
    SERVING,
    UNVERIFIED,
    Action,
    Event,
    EventKind,
    RestartPolicy,
    ServerRecord,
    State,
    transition,
)

POLICY = RestartPolicy(
    max_restarts=2,
    back_off=1.0,
    health_check_timeout=30,
    max_failures=3,
    reset_after=100,
    start_timeout=50,
)


def run(
    record: ServerRecord, *events: tuple[EventKind, float] | tuple[EventKind, float, str]
) -> ServerRecord:
    for kind, now, *version in events:
        record, _ = transition(record, Event(kind, *version), now, POLICY)
    return record


def healthy(managed: bool = True) -> ServerRecord:
    record = run(ServerRecord(managed), (EventKind.ANSWERED, 1.0), (EventKind.REFITTED, 2.0, "7"))
    assert record.state is State.HEALTHY
    return record


def test_a_started_server_is_stale_until_it_is_refitted() -> None:
    record = run(ServerRecord(managed=True), (EventKind.ANSWERED, 1.0))
    assert record.state is State.STALE and not record.routable("7") and not record.routable(None)
    record = run(record, (EventKind.REFITTED, 2.0, "7"))
    assert record.routable("7") and record.routable(None) and not record.routable("8")


def test_a_server_that_needs_no_refit_serves_what_it_started_with() -> None:
    policy = replace(POLICY, needs_refit=False)
    record, _ = transition(ServerRecord(managed=True), Event(EventKind.ANSWERED), 1.0, policy)
    assert record.routable(None) and record.version == UNVERIFIED


def test_a_failed_request_is_a_suspicion_that_a_probe_settles() -> None:
    suspect = run(healthy(), (EventKind.REQUEST_FAILED, 3.0))
    assert suspect.state is State.SUSPECT and not suspect.routable("7")
    assert run(suspect, (EventKind.ANSWERED, 4.0)).routable("7")
    assert run(suspect, (EventKind.PROBE_FAILED, 32.9)).state is State.SUSPECT
    dead = run(suspect, (EventKind.PROBE_FAILED, 4.0), (EventKind.PROBE_FAILED, 33.0))
    assert (
        dead.state is State.DEAD
        and "no sign of work for 30 s (rollout.health_check_timeout" in dead.reason
    )


def test_patience_begins_when_the_first_probe_fails() -> None:
    record = run(healthy(), (EventKind.PROBE_FAILED, 90.0))
    assert record.state is State.SUSPECT
    assert run(record, (EventKind.PROBE_FAILED, 119.9)).state is State.SUSPECT
    assert run(record, (EventKind.PROBE_FAILED, 120.0)).state is State.DEAD


def test_a_server_that_works_is_busy_however_long() -> None:
    record = healthy()
    for now in range(20, 10_000, 20):
        record = run(record, (EventKind.BUSY, now))
    assert record.state is State.SUSPECT and record.busy and not record.routable("7")
    assert run(record, (EventKind.PROBE_FAILED, now + 29.9)).state is State.SUSPECT
    assert run(record, (EventKind.PROBE_FAILED, now + 30.0)).state is State.DEAD, "it hangs now"
    answered = run(record, (EventKind.ANSWERED, now + 1))
    assert answered.routable("7") and not answered.busy, "it keeps its weights"


def test_nothing_at_the_address_counts_in_a_row() -> None:
    record = healthy()
    for now in range(3, 30, 3):
        record = run(record, (EventKind.UNREACHABLE, now), (EventKind.UNREACHABLE, now))
        record = run(record, (EventKind.ANSWERED, now))
    assert record.state is State.HEALTHY
    record = run(record, *[(EventKind.UNREACHABLE, 40.0)] * 2)
    assert record.state is State.SUSPECT
    assert run(record, (EventKind.UNREACHABLE, 40.0)).state is State.DEAD


def test_a_failed_push_is_a_suspicion_that_leaves_it_stale() -> None:
    suspect = run(healthy(), (EventKind.SYNC_FAILED, 3.0))
    assert suspect.state is State.SUSPECT
    assert run(suspect, (EventKind.ANSWERED, 4.0)).state is State.STALE
    assert run(suspect, (EventKind.PROBE_FAILED, 33.0)).state is State.DEAD
    assert (
        run(ServerRecord(True), (EventKind.ANSWERED, 1.0), (EventKind.SYNC_FAILED, 2.0)).state
        is State.SUSPECT
    )


@pytest.mark.parametrize(("kind", "most"), [(EventKind.SYNC_FAILED, 3), (EventKind.MISMATCH, 2)])
def test_pushes_that_fail_in_a_row_give_a_server_up(kind: EventKind, most: int) -> None:
    record = healthy()
    for now in range(10, 50, 10):  # a successful push resets the counts
        missed = [(kind, now), (EventKind.ANSWERED, now + 1)] * (most - 1)
        record = run(record, *missed, (EventKind.REFITTED, now + 2, "8"))
        assert record.state is State.HEALTHY
    record = run(record, *[(kind, 60.0), (EventKind.ANSWERED, 61.0)] * most)
    assert record.state is State.RETIRED and f"after {most}" in record.reason


@pytest.mark.parametrize("kind", [EventKind.SYNC_FAILED, EventKind.WRONG_VERSION])
def test_a_server_whose_weights_are_in_doubt_is_stale(kind: EventKind) -> None:
    assert run(healthy(), (EventKind.WRONG_VERSION, 3.0)).state is State.STALE
    suspect = run(healthy(), (EventKind.REQUEST_FAILED, 3.0), (kind, 4.0))
    assert suspect.state is State.SUSPECT
    assert run(suspect, (EventKind.ANSWERED, 5.0)).state is State.STALE


def test_restarts_back_off_and_end() -> None:
    record, waits = healthy(), []
    for died in (10.0, 20.0, 30.0):
        record, action = transition(record, Event(EventKind.EXITED, reason="killed"), died, POLICY)
        assert action is Action.STOP
        if record.state is State.RETIRED:
            break
        waits.append(record.retry_at - died)
        early, action = transition(record, Event(EventKind.TICK), record.retry_at - 0.1, POLICY)
        assert early.state is State.DEAD and action is Action.NOTHING
        record, action = transition(record, Event(EventKind.TICK), record.retry_at, POLICY)
        assert record.state is State.STARTING and action is Action.START
    assert waits == [1.0, 2.0]
    assert record.state is State.RETIRED
    assert record.reason == "given up after 2 restarts (rollout.max_restarts): killed"


def test_the_restart_counter_resets_after_long_health() -> None:
    record = replace(healthy(), restarts=2)
    assert run(record, (EventKind.TICK, 101.9)).restarts == 2
    assert run(record, (EventKind.TICK, 102.0)).restarts == 0
    # A suspicion that passes does not set the clock back; a death does.
    wobbly = run(
        record,
        (EventKind.REQUEST_FAILED, 50.0),
        (EventKind.ANSWERED, 51.0),
        (EventKind.TICK, 102.0),
    )
    assert wobbly.restarts == 0
    assert run(record, (EventKind.EXITED, 102.0)).state is State.DEAD, "not given up at the moment"


def test_an_external_server_may_come_back_stale_however_late() -> None:
    away = run(
        healthy(managed=False),
        (EventKind.REQUEST_FAILED, 3.0),
        *[(EventKind.UNREACHABLE, 4.0)] * 3,
    )
    assert away.state is State.DEAD
    assert run(away, (EventKind.TICK, 53.9), (EventKind.ANSWERED, 53.9)).state is State.STALE
    lost = run(away, (EventKind.TICK, 54.0))
    assert lost.state is State.AWAY and "away for" in lost.reason
    lost = run(lost, (EventKind.START_FAILED, 60.0))
    assert lost.state is State.AWAY and "refused" in lost.reason
    back = run(lost, (EventKind.TICK, 9999.0), (EventKind.ANSWERED, 9999.0))
    assert back.state is State.STALE and back.version is None


EVENTS = st.lists(
    st.tuples(
        st.builds(
            Event,
            st.sampled_from(EventKind),
            version=st.sampled_from(["1", "2"]),
            reason=st.just("why"),
        ),
        st.sampled_from([0.0, 0.2, 1.0, 5.0, 60.0, 200.0]),
    ),
    max_size=60,
)
GONE = (EventKind.EXITED, EventKind.START_FAILED)


@given(EVENTS, st.booleans())
def test_no_request_goes_to_weights_that_were_not_verified_since_the_last_start(
    events: list[tuple[Event, float]], managed: bool
) -> None:
    record, now = ServerRecord(managed), 0.0
    verified: str | None = None  # by the events alone
    for event, pause in events:
        now += pause
        before = record
        record, action = transition(record, event, now, POLICY)
        if event.kind is EventKind.REFITTED:
            verified = event.version
        doubts = (EventKind.SYNC_FAILED, EventKind.MISMATCH, EventKind.WRONG_VERSION)
        if event.kind in (*GONE, *doubts) or action is Action.START:
            verified = None
        for version in ("1", "2"):
            if record.routable(version):
                assert verified == version
        if record.routable(None):
            assert verified is not None
        if before.state in (*SERVING, State.STALE) and event.kind is EventKind.REMOVE:
            assert record.state is State.LEAVING and record.version == before.version
        if before.state in LEFT:
            assert record.state in LEFT, "only the user brings it back"
        if before.state in (State.STARTING, State.DEAD, State.AWAY, State.RETIRED, *LEFT):
            assert record.state is not State.HEALTHY, "it must answer and be refitted first"


@given(EVENTS, st.booleans())
def test_restarts_never_exceed_the_bound(events: list[tuple[Event, float]], managed: bool) -> None:
    record, now, starts, reset = ServerRecord(managed), 0.0, 0, 0
    for event, pause in events:
        now += pause
        before = record
        record, action = transition(record, event, now, POLICY)
        starts += action is Action.START
        if record.restarts < before.restarts:
            reset += before.restarts
        if record.state is not State.RETIRED:
            assert starts - reset == record.restarts <= POLICY.max_restarts
        if before.state is State.RETIRED and event.kind is not EventKind.REMOVE:
            assert record == before and action is Action.NOTHING
        if action is Action.START:
            assert before.state is State.DEAD and now >= before.retry_at
        if not managed:
            assert action is Action.NOTHING
        if record.state is State.DEAD and before.state is not State.DEAD and managed:
            assert action is Action.STOP, "nothing of it is left behind"
