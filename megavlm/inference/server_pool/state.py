"""State machine of a rollout server: a pure function from a record and an event to the next record
and an action.

    starting   launched, or looked for: it has not answered yet
    stale      it answers, and its weights are not known to be the current ones: no requests
    healthy    it answers and was refitted with `version`
    suspect    something failed; no new requests until a probe has settled whether it lives
    dead       gone: a managed server restarts at `retry_at`, an external one is probed
    away       an external server that was dead for `start_timeout`: it counts as lost, and is
               looked for now and then, as long as the run lives
    retired    given up for the rest of the run
    leaving    removed by the user: no new requests, and it ends those that it has
    removed    it has left; it returns only if the user adds it again

This module uses no clock, no process and no network.
"""

from dataclasses import dataclass, replace
from enum import Enum


class State(Enum):
    STARTING = "starting"
    STALE = "stale"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    AWAY = "away"
    RETIRED = "retired"
    LEAVING = "leaving"
    REMOVED = "removed"


class Action(Enum):
    NOTHING = "nothing"
    START = "start"
    STOP = "stop"  # end the remaining processes of the server


class EventKind(Enum):
    ANSWERED = "answered"  # to a probe or a request
    REQUEST_FAILED = "a request failed"
    PROBE_FAILED = "a probe failed"
    BUSY = "a probe failed, and the server works"
    WORKED = "the server works"
    UNREACHABLE = "nothing listens at its address"
    START_FAILED = "the start failed"
    EXITED = "the process exited"
    REFITTED = "refitted"
    SYNC_FAILED = "a push failed"
    MISMATCH = "it holds other tensors than it was sent"
    WRONG_VERSION = "it holds other weights"
    TICK = "time passed"
    REMOVE = "the user removes it"
    DRAINED = "it has no requests"


@dataclass(frozen=True)
class Event:
    """Event of one server. version: Weight version of REFITTED. reason: Reason of a failure, for
    the user.
    """

    kind: EventKind
    version: str = ""
    reason: str = ""


@dataclass(frozen=True)
class RestartPolicy:
    """Policy for restarting servers and giving them up. Times are in seconds.

    max_restarts: Maximum restarts of a managed server; the counter resets after `reset_after`
    healthy seconds. back_off: Pause before the first restart; it doubles with each restart.
    health_check_timeout: Time after which a suspect server that answers no probe and shows no work
    counts as dead. max_failures: Probes in a row that find nothing at its address, after which a
    server counts as dead. start_timeout: Time to become healthy; also the absence after which an
    external server no longer counts for min_servers. max_missed: Failed pushes in a row after which
    a server is given up. max_mismatches: Pushes with wrong checksums, among these, after which a
    server is given up. min_servers: Fewest servers with which a run continues. needs_refit: True
    if a started server gets requests only after a push. abort_leaving: True if the requests of a
    server that the user removes are aborted and continued by others. It ends them itself if this is
    false.
    """

    max_restarts: int = 3
    back_off: float = 2.0
    health_check_timeout: float = 60.0
    max_failures: int = 3
    reset_after: float = 600.0
    start_timeout: float = 300.0
    max_missed: int = 3
    max_mismatches: int = 2
    min_servers: int = 1
    needs_refit: bool = True
    abort_leaving: bool = False

    def pause(self, restarts: int) -> float:
        """Return the seconds to wait before restart number `restarts` + 1."""
        return self.back_off * 2.0**restarts


@dataclass(frozen=True)
class ServerRecord:
    """State of one server. Times are in seconds of the pool's clock.

    version: Version of the weights that it was refitted with and still has; None if it must be
    refitted. failures: Probes in a row that found nothing at its address. busy: True if it answers
    no probe but works. missed: Failed pushes in a row. mismatches: How many of these ended with
    wrong checksums. restarts: The restart counter. since: Start of the current state, or of a busy
    server its last sign of work. healthy_since: Time when it last became fit for requests.
    retry_at: Time of the next restart. reason: Reason of its last failure.
    """

    managed: bool
    state: State = State.STARTING
    version: str | None = None
    failures: int = 0
    busy: bool = False
    missed: int = 0
    mismatches: int = 0
    restarts: int = 0
    since: float = 0.0
    healthy_since: float = 0.0
    retry_at: float = 0.0
    reason: str = ""

    def routable(self, version: str | None) -> bool:
        """Return True if the server may get requests for weights `version` (None for any
        version).
        """
        return self.state is State.HEALTHY and version in (None, self.version)


ANSWERING = (State.STALE, State.HEALTHY, State.SUSPECT)
GONE = (State.DEAD, State.AWAY)
SERVING = (State.HEALTHY, State.SUSPECT, State.LEAVING)  # states that keep requests in flight
LEFT = (State.LEAVING, State.REMOVED)
LOST = (State.AWAY, State.RETIRED, *LEFT)  # states that do not count for min_servers
UNVERIFIED = ""  # version of a server that needs no refit


def transition(
    record: ServerRecord, event: Event, now: float, policy: RestartPolicy
) -> tuple[ServerRecord, Action]:
    """Return the record after an event at time `now`, and the action that the supervisor must
    take.
    """
    if record.state is State.LEAVING:
        return _leaving(record, event, now), Action.NOTHING
    if event.kind is EventKind.REMOVE:
        return _removed(record, now), Action.NOTHING
    if record.state in (State.RETIRED, State.REMOVED):
        return record, Action.NOTHING
    match event.kind:
        case EventKind.ANSWERED:
            return _answered(record, now, policy), Action.NOTHING
        case EventKind.REFITTED:
            return _refitted(record, event.version, now), Action.NOTHING
        case EventKind.WRONG_VERSION:
            return _outdated(record, event.reason, now), Action.NOTHING
        case EventKind.SYNC_FAILED | EventKind.MISMATCH:
            return _missed_push(record, event, now, policy), Action.NOTHING
        case EventKind.REQUEST_FAILED:
            if record.state is State.HEALTHY:
                record = _to(record, State.SUSPECT, now, reason=event.reason)
            return record, Action.NOTHING
        case EventKind.PROBE_FAILED:
            return _probe_failed(record, event.reason, now, policy)
        case EventKind.UNREACHABLE:
            return _unreachable(record, event.reason, now, policy)
        case EventKind.BUSY:
            return _busy(record, event.reason, now), Action.NOTHING
        case EventKind.EXITED | EventKind.START_FAILED:
            return _died(record, event.reason, now, policy)
        case EventKind.WORKED | EventKind.DRAINED:
            return record, Action.NOTHING
        case EventKind.TICK:
            return _tick(record, now, policy)


def _to(record: ServerRecord, state: State, now: float, **changes: object) -> ServerRecord:
    since = record.since if state is record.state else now
    return replace(record, state=state, since=since, **changes)  # type: ignore[arg-type]


def _answered(record: ServerRecord, now: float, policy: RestartPolicy) -> ServerRecord:
    if record.state is State.DEAD and record.managed:
        return record  # a late answer of a process that has already ended
    if record.state in (State.STARTING, *GONE):
        version = None if policy.needs_refit else UNVERIFIED
        record = replace(record, version=version)
    if record.version is None:
        return _to(record, State.STALE, now, failures=0, busy=False)
    return _healthy(record, now)


def _healthy(record: ServerRecord, now: float) -> ServerRecord:
    # A server that was only suspect keeps the start of its healthy time.
    fit = record.state in (State.HEALTHY, State.SUSPECT)
    healthy_since = record.healthy_since if fit else now
    return _to(record, State.HEALTHY, now, failures=0, busy=False, healthy_since=healthy_since)


def _refitted(record: ServerRecord, version: str, now: float) -> ServerRecord:
    if record.state not in ANSWERING:
        return record  # the process has ended meanwhile, so its weights are gone
    return _healthy(replace(record, version=version, missed=0, mismatches=0), now)


def _outdated(record: ServerRecord, reason: str, now: float) -> ServerRecord:
    if record.state is State.HEALTHY:
        return _to(record, State.STALE, now, version=None, failures=0, reason=reason)
    return replace(record, version=None, reason=reason)


def _missed_push(
    record: ServerRecord, event: Event, now: float, policy: RestartPolicy
) -> ServerRecord:
    mismatches = record.mismatches + (event.kind is EventKind.MISMATCH)
    missed = record.missed + 1
    record = replace(
        record, version=None, missed=missed, mismatches=mismatches, reason=event.reason
    )
    if mismatches >= policy.max_mismatches:
        return _retired(record, f"given up after {mismatches} pushes with other checksums", now)
    if missed >= policy.max_missed:
        return _retired(record, f"given up after {missed} failed pushes", now)
    if record.state in ANSWERING:  # a probe then decides at once whether it lives
        return _to(record, State.SUSPECT, now, failures=0)
    return record


def _retired(record: ServerRecord, why: str, now: float) -> ServerRecord:
    return _to(record, State.RETIRED, now, version=None, reason=f"{why}: {record.reason}")


def _probe_failed(
    record: ServerRecord, reason: str, now: float, policy: RestartPolicy
) -> tuple[ServerRecord, Action]:
    if record.state not in ANSWERING:
        return record, Action.NOTHING
    if record.state is State.SUSPECT and now - record.since >= policy.health_check_timeout:
        why = (
            f"no answer and no sign of work for {policy.health_check_timeout:g} s "
            f"(rollout.health_check_timeout; if it "
            f"only had too much to do, raise that or lower rollout.concurrency): {reason}"
        )
        return _died(record, why, now, policy)
    return _to(record, State.SUSPECT, now, reason=reason), Action.NOTHING


def _unreachable(
    record: ServerRecord, reason: str, now: float, policy: RestartPolicy
) -> tuple[ServerRecord, Action]:
    if record.state not in ANSWERING:
        return record, Action.NOTHING
    failures = record.failures + 1
    if failures >= policy.max_failures:
        return _died(record, reason, now, policy)
    return _to(record, State.SUSPECT, now, failures=failures, reason=reason), Action.NOTHING


def _busy(record: ServerRecord, reason: str, now: float) -> ServerRecord:
    if record.state not in ANSWERING:
        return record
    return replace(record, state=State.SUSPECT, since=now, failures=0, busy=True, reason=reason)


def _died(
    record: ServerRecord, reason: str, now: float, policy: RestartPolicy
) -> tuple[ServerRecord, Action]:
    if record.state in GONE:
        if not record.managed:  # it has answered, but does not meet the requirements
            record = replace(record, reason=f"refused ({reason})")
        return record, Action.NOTHING
    record = _reset_counter(record, now, policy)
    gone = replace(record, version=None, failures=0, busy=False, reason=reason)
    if not record.managed:
        return _to(gone, State.DEAD, now), Action.NOTHING
    if record.restarts >= policy.max_restarts:
        why = f"given up after {record.restarts} restarts (rollout.max_restarts)"
        return _retired(gone, why, now), Action.STOP
    retry_at = now + policy.pause(record.restarts)
    return _to(gone, State.DEAD, now, retry_at=retry_at), Action.STOP


def _removed(record: ServerRecord, now: float) -> ServerRecord:
    state = State.LEAVING if record.state in ANSWERING else State.REMOVED
    return _to(record, state, now, reason="removed by megavlm servers remove")


def _leaving(record: ServerRecord, event: Event, now: float) -> ServerRecord:
    if event.kind is EventKind.DRAINED:
        return _to(record, State.REMOVED, now, version=None)
    if event.kind is EventKind.WRONG_VERSION:
        return replace(record, version=None)
    return record


def _tick(record: ServerRecord, now: float, policy: RestartPolicy) -> tuple[ServerRecord, Action]:
    if not record.managed:
        if record.state is State.DEAD and now - record.since >= policy.start_timeout:
            why = f"away for {policy.start_timeout:g} s (rollout.start_timeout): {record.reason}"
            return _to(record, State.AWAY, now, reason=why), Action.NOTHING
        return record, Action.NOTHING
    if record.state is State.DEAD and now >= record.retry_at:
        restarts = record.restarts + 1
        return _to(record, State.STARTING, now, restarts=restarts), Action.START
    return _reset_counter(record, now, policy), Action.NOTHING


def _reset_counter(record: ServerRecord, now: float, policy: RestartPolicy) -> ServerRecord:
    fit = record.state in (State.HEALTHY, State.SUSPECT)
    if fit and now - record.healthy_since >= policy.reset_after:
        return replace(record, restarts=0)
    return record
