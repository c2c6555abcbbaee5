"""What happens to a server of the fleet: a pure function from a record and an event to the next
record and what is to be done.

    starting   launched, or looked for: it has not answered yet
    stale      it answers, and its weights are not known to be the current ones: no requests
    healthy    it answers and was refitted with `version`
    suspect    something went wrong; no new requests until a probe says whether it lives
    dead       gone: a managed server is started again at `retry_at`, an external one looked for
    retired    given up for good

No clock, no process and no network here.
"""

from dataclasses import dataclass, replace
from enum import Enum


class State(Enum):
    STARTING = "starting"
    STALE = "stale"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RETIRED = "retired"


class Action(Enum):
    NOTHING = "nothing"
    START = "start"
    STOP = "stop"  # end what is left of its processes


class Kind(Enum):
    ANSWERED = "answered"  # a probe, or a request
    REQUEST_FAILED = "a request failed"
    PROBE_FAILED = "a probe failed"
    START_FAILED = "the start failed"
    EXITED = "the process exited"
    REFITTED = "refitted"
    SYNC_FAILED = "a push failed"
    MISMATCH = "it holds other tensors than it was sent"
    WRONG_VERSION = "it holds other weights"
    TICK = "time passed"


@dataclass(frozen=True)
class Event:
    """version: of REFITTED. reason: for the user, of what failed."""

    kind: Kind
    version: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Policy:
    """max_restarts: of a managed server, counted until it was healthy for `forget_after`.
    back_off: before the first restart; it doubles with each. max_failures: probes in a row that a
    suspect may fail. give_up_after: how long an external server may be away. max_missed: pushes in
    a row that fail at a server before it is given up; max_mismatches: those after which its
    checksums differ. needs_refit: whether a server that has started needs weights before it gets
    requests. Times in seconds.
    """

    max_restarts: int = 3
    back_off: float = 2.0
    max_failures: int = 3
    forget_after: float = 600.0
    give_up_after: float = 300.0
    max_missed: int = 3
    max_mismatches: int = 2
    needs_refit: bool = True

    def wait(self, restarts: int) -> float:
        """Before restart number `restarts` + 1."""
        return self.back_off * 2.0**restarts


@dataclass(frozen=True)
class Record:
    """version: of the weights it was refitted with and still has, as far as we know; None where it
    must be refitted. failures: probes in a row. missed, mismatches: pushes since the last that came
    through, and those of them after which checksums differed. restarts: made and not forgotten.
    since: when it came into its state; healthy_since: when it last became fit for requests. reason:
    of its last trouble.
    """

    managed: bool
    state: State = State.STARTING
    version: str | None = None
    failures: int = 0
    missed: int = 0
    mismatches: int = 0
    restarts: int = 0
    since: float = 0.0
    healthy_since: float = 0.0
    retry_at: float = 0.0
    reason: str = ""

    def routable(self, version: str | None) -> bool:
        """Whether requests that want this version (None: any) may go to it."""
        return self.state is State.HEALTHY and version in (None, self.version)


ANSWERING = (State.STALE, State.HEALTHY, State.SUSPECT)
UNVERIFIED = ""  # the version of a server that needs no refit


def transition(record: Record, event: Event, now: float, policy: Policy) -> tuple[Record, Action]:
    """The record after an event at time `now`, and what its keeper must do."""
    if record.state is State.RETIRED:
        return record, Action.NOTHING
    match event.kind:
        case Kind.ANSWERED:
            return _answered(record, now, policy), Action.NOTHING
        case Kind.REFITTED:
            return _refitted(record, event.version, now), Action.NOTHING
        case Kind.WRONG_VERSION:
            return _outdated(record, event.reason, now), Action.NOTHING
        case Kind.SYNC_FAILED | Kind.MISMATCH:
            mismatch = event.kind is Kind.MISMATCH
            return _missed(record, event.reason, now, policy, mismatch), Action.NOTHING
        case Kind.REQUEST_FAILED:
            if record.state is State.HEALTHY:
                record = _to(record, State.SUSPECT, now, reason=event.reason)
            return record, Action.NOTHING
        case Kind.PROBE_FAILED:
            return _probe_failed(record, event.reason, now, policy)
        case Kind.EXITED | Kind.START_FAILED:
            return _died(record, event.reason, now, policy)
        case Kind.TICK:
            return _tick(record, now, policy)


def _to(record: Record, state: State, now: float, **changes: object) -> Record:
    since = record.since if state is record.state else now
    return replace(record, state=state, since=since, **changes)  # type: ignore[arg-type]


def _answered(record: Record, now: float, policy: Policy) -> Record:
    if record.state is State.DEAD and record.managed:
        return record  # a late answer of the process that is gone
    if record.state in (State.STARTING, State.DEAD):
        version = None if policy.needs_refit else UNVERIFIED
        record = replace(record, version=version)
    if record.version is None:
        return _to(record, State.STALE, now, failures=0)
    return _healthy(record, now)


def _healthy(record: Record, now: float) -> Record:
    fit = record.state in (State.HEALTHY, State.SUSPECT)  # a suspicion that passes is no illness
    healthy_since = record.healthy_since if fit else now
    return _to(record, State.HEALTHY, now, failures=0, healthy_since=healthy_since)


def _refitted(record: Record, version: str, now: float) -> Record:
    """A process that has gone meanwhile has taken its weights with it."""
    if record.state not in ANSWERING:
        return record
    return _healthy(replace(record, version=version, missed=0, mismatches=0), now)


def _outdated(record: Record, reason: str, now: float) -> Record:
    if record.state is State.HEALTHY:
        return _to(record, State.STALE, now, version=None, failures=0, reason=reason)
    return replace(record, version=None, reason=reason)


def _missed(record: Record, reason: str, now: float, policy: Policy, mismatch: bool) -> Record:
    """A push failed there: whether it lives is a probe's to say, at once."""
    missed, mismatches = record.missed + 1, record.mismatches + mismatch
    record = replace(record, version=None, missed=missed, mismatches=mismatches, reason=reason)
    if mismatches >= policy.max_mismatches:
        return _retired(record, f"given up after {mismatches} pushes with other checksums", now)
    if missed >= policy.max_missed:
        return _retired(record, f"given up after {missed} failed pushes", now)
    if record.state in ANSWERING:
        return _to(record, State.SUSPECT, now, failures=0)
    return record


def _retired(record: Record, why: str, now: float) -> Record:
    return _to(record, State.RETIRED, now, version=None, reason=f"{why}: {record.reason}")


def _probe_failed(record: Record, reason: str, now: float, policy: Policy) -> tuple[Record, Action]:
    if record.state not in ANSWERING:
        return record, Action.NOTHING
    failures = record.failures + 1
    if failures >= policy.max_failures:
        return _died(record, reason, now, policy)
    return _to(record, State.SUSPECT, now, failures=failures, reason=reason), Action.NOTHING


def _died(record: Record, reason: str, now: float, policy: Policy) -> tuple[Record, Action]:
    if record.state is State.DEAD:
        return record, Action.NOTHING
    record = _forget(record, now, policy)
    gone = replace(record, version=None, failures=0, reason=reason)
    if not record.managed:
        return _to(gone, State.DEAD, now), Action.NOTHING
    if record.restarts >= policy.max_restarts:
        why = f"given up after {record.restarts} restarts (rollout.max_restarts)"
        return _retired(gone, why, now), Action.STOP
    retry_at = now + policy.wait(record.restarts)
    return _to(gone, State.DEAD, now, retry_at=retry_at), Action.STOP


def _tick(record: Record, now: float, policy: Policy) -> tuple[Record, Action]:
    if not record.managed:
        if record.state is State.DEAD and now - record.since >= policy.give_up_after:
            why = f"given up after {policy.give_up_after:g} s away (rollout.start_timeout)"
            return _retired(record, why, now), Action.NOTHING
        return record, Action.NOTHING
    if record.state is State.DEAD and now >= record.retry_at:
        restarts = record.restarts + 1
        return _to(record, State.STARTING, now, restarts=restarts), Action.START
    return _forget(record, now, policy), Action.NOTHING


def _forget(record: Record, now: float, policy: Policy) -> Record:
    """Without its restarts, when it has been well for long enough."""
    fit = record.state in (State.HEALTHY, State.SUSPECT)
    if fit and now - record.healthy_since >= policy.forget_after:
        return replace(record, restarts=0)
    return record
