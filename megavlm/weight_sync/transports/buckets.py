"""Sending of scheduled buckets: what the transports through memory and through the network share.

Rank 0 serves a store on a port of its own and sends one request to each server. From then on every
sending rank and every rank of the servers follows the schedule, and they talk through the store:
any of them that fails sets `fault`, and all others give up.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from megavlm.inference.server_support.megavlm_weights import POLL
from megavlm.parallel import platform
from megavlm.weight_sync.schedule import Server, SyncSchedule, make_schedule
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.transports.base import Sending
from megavlm.weight_sync.transports.packer import LastSent, Packed, Packer
from megavlm.weight_sync.transports.server_requests import KEPT, Requests, ServerRequests
from megavlm.weight_sync.transports.store import Fault, Rendezvous, StoreClient
from megavlm.weight_sync.update import SendReport, SyncAttempt


class BucketTransport:
    """Sends every rank's own shards, by `make_schedule`. timeout: Seconds for each bucket."""

    def __init__(self, *, timeout: float = 300.0) -> None:
        self._timeout = timeout
        self._last = LastSent()
        self._verified: str | None = None  # on rank 0; the attempt whose weights all servers have
        self._store = StoreClient(timeout)
        self._requests = ServerRequests(self._store, self._group, timeout)  # of rank 0
        self._schedules: dict[object, SyncSchedule] = {}
        self._progress = 0.0  # time.monotonic() at the last bucket

    def prepare(self, servers: Servers, attempt: SyncAttempt) -> Rendezvous:
        address = self._store.serve(attempt.urls)
        self._requests.forget(attempt.receivers)
        # A push of everything is for servers that may hold anything.
        base = None if attempt.refitted else self._verified
        self._verified = None
        return Rendezvous(*address, secrets.token_hex(8), self._group_name(attempt), base)

    def send(self, sending: Sending) -> SendReport:
        attempt, rank = sending.attempt, dist.get_rank()
        schedule = self._schedule(sending)
        mine = [x for x in schedule.streams if rank in (x.holder, x.sender)]
        delta = sending.settings.delta
        base = self._last.begin(schedule, attempt.rendezvous) if delta else None
        work: Future[Packed] = Future()
        requests: Requests = {}
        error, is_own, lost = None, False, dict[str, str]()
        self.note_progress()
        try:
            self._store.connect("polls", attempt.rendezvous)
            if sending.servers is not None:
                requests = self._requests.send(sending, schedule, base)
            if mine:
                last = self._last if delta else None
                packer = Packer(sending.shards, sending.settings.dtype, last, base)
                work = _in_thread(lambda: self._send(sending, schedule, packer))
            else:
                work.set_result(Packed())
            self._wait(work, requests, attempt.rendezvous)
            if sending.servers is not None:
                self._requests.read_answers(attempt, complete=True)
        except (Fault, RuntimeError) as fault:
            error, is_own = str(fault), getattr(fault, "is_own", False)
            lost = self._give_up(fault, sending, work, requests)
        packed = work.result() if error is None else Packed()
        return SendReport(
            sum(
                size * len(schedule.targets[schedule.streams[index].target].urls)
                for index, size in packed.bytes.items()
            ),
            schedule.tensors if rank == 0 else 0,
            packed.sums,
            lost,
            error,
            is_own,
            packed.changed,
            packed.compared,
        )

    def complete(self, sending: Sending, reports: Sequence[SendReport]) -> int:
        assert sending.servers is not None
        servers, schedule = sending.servers, self._schedule(sending)
        sent = {index: sums for report in reports for index, sums in report.sums.items()}
        count = 0
        for (url, rank), answer in self._requests.answers.items():
            streams = schedule.to(url, rank)
            if where := difference(schedule, streams, sent, answer["sums"]):
                servers.mismatched.add(url)
                servers.lose(url, f"{url}: checksum mismatch on rank {rank} in {where}")
            count += num_checked(schedule, streams)
        if not servers.lost:
            self._verified = sending.attempt.rendezvous.attempt
        return count

    def close(self) -> None:
        """Release this rank's resources, at the end of the run."""

    # What the transports differ in

    def _servers(self, attempt: SyncAttempt) -> list[Server]:
        raise NotImplementedError

    def _send(self, sending: Sending, schedule: SyncSchedule, packer: Packer) -> Packed:
        """Send this rank's streams, in a thread, and return what it has packed. Raises Fault or
        RuntimeError.
        """
        raise NotImplementedError

    def _group_name(self, attempt: SyncAttempt) -> str:
        return ""

    def _group(self, schedule: SyncSchedule, url: str, rank: int, token: str) -> Any:
        """Return the `group` of a task. token: `Rendezvous.group`."""
        return None

    def _abort(self, work: "Future[Packed]") -> None:
        """End this rank's sending after a failure. work: The result of `_send`."""
        wait([work], self._timeout)

    # Waiting and failures

    def note_progress(self) -> None:
        """Note that a bucket was sent."""
        self._progress = time.monotonic()

    def _wait(self, work: "Future[Packed]", requests: Requests, rendezvous: Rendezvous) -> None:
        """Block until this rank has sent everything and all requests are answered."""
        waiting = {work, *requests}
        while waiting:
            done, waiting = wait(waiting, POLL, "FIRST_COMPLETED")
            refused = {}
            for future in done:
                if failure := future.exception():
                    if future is work:
                        raise failure if isinstance(failure, Fault) else Fault(str(failure))
                    refused[requests[future]] = str(failure)
            if refused:
                raise Fault("; ".join(refused.values()), refused)
            self._store.check(rendezvous)
            if work in waiting and time.monotonic() > self._progress + self._timeout:
                raise Fault(f"no bucket was sent for {self._timeout:g} s")

    def _give_up(
        self, fault: Exception, sending: Sending, work: "Future[Packed]", requests: Requests
    ) -> dict[str, str]:
        """Tell the other ranks about a failure. On rank 0, return the servers that caused it."""
        lost = dict(getattr(fault, "lost", {}))
        self._store.report(sending.attempt.rendezvous, str(fault), lost)
        self._abort(work)
        return (
            lost if sending.servers is None else self._requests.find_lost(sending, requests, lost)
        )

    def _schedule(self, sending: Sending) -> SyncSchedule:
        servers, settings = self._servers(sending.attempt), sending.settings
        key = tuple(servers)
        if key not in self._schedules:
            while len(self._schedules) >= KEPT:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = make_schedule(
                sending.plan, servers, settings.dtype, settings.bucket_bytes
            )
        return self._schedules[key]


def difference(
    schedule: SyncSchedule, streams: Sequence[int], sent: Mapping[int, Any], held: Sequence[Any]
) -> str | None:
    """Return which parameters of a server's rank have other checksums than what was sent, None if
    none have.

    streams: Indices of the streams to the rank. sent: Checksums of the buckets, by stream. held:
    Those that the rank answers, for each of the streams.
    """
    for index, theirs in zip(streams, held, strict=True):
        buckets = schedule.streams[index].buckets
        for pieces, ours, found in zip(buckets, sent[index], theirs, strict=True):
            if ours != found:
                first, last = pieces[0].name, pieces[-1].name
                return first if first == last else f"{first} or another up to {last}"
    return None


def num_checked(schedule: SyncSchedule, streams: Sequence[int]) -> int:
    """Return the number of parameters of which checksums are compared."""
    buckets = [bucket for index in streams for bucket in schedule.streams[index].buckets]
    return len({piece.name for bucket in buckets for piece in bucket if not piece.whole})


def _in_thread(work: Callable[[], Packed]) -> "Future[Packed]":
    """Run `work` in a daemon thread, so that a transfer that hangs does not keep the process
    alive.
    """
    future: Future[Packed] = Future()

    def run() -> None:
        platform.join(platform.device())
        try:
            with torch.no_grad():
                future.set_result(work())
        except (Fault, OSError, RuntimeError, ValueError) as error:
            future.set_exception(error)

    Thread(target=run, name="sender", daemon=True).start()
    return future
