"""Transport by NCCL or gloo from the first rank of each pipeline stage, all stages at once.

SGLang's `update_weights_from_distributed` broadcasts whole tensors to every rank of a server, and
each rank cuts out its slice (`load_format` has no slices). It also takes the tensors of only one
group per request. Servers with the megavlm loaders therefore get slices in another way: for each
stage, the first ranks of all servers form a group with the stage's sender, the second ranks another
group, and so on. In each group the sender broadcasts the slices that these ranks store. A rank
receives from all stages at the same time, and stores every byte that it receives.

Sending is done in rounds. In each round every stage has a bucket ready and describes it in rank 0's
store. Rank 0 then sends one request to each server, and the server receives all of these buckets.
Because only rank 0 makes requests, all servers receive in the same order, and no broadcast waits
for another. A server without the megavlm loaders gets one request per stage.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_support.megavlm_weights import join
from megavlm.parallel import platform
from megavlm.parallel.watchdog import SERVERS_GROUP
from megavlm.weight_sync.server_api import CLEANUP_TIMEOUT, Servers
from megavlm.weight_sync.transports.base import Delivery
from megavlm.weight_sync.transports.rounds import (
    POLL,
    Bodies,
    BroadcastPart,
    Rendezvous,
    RoundFailure,
    StageMessages,
    bucket_parts,
    connect,
    invitations,
    slice_requests,
    whole_requests,
)
from megavlm.weight_sync.transports.tensor import UPDATE
from megavlm.weight_sync.update import SyncAttempt, TensorBucket

JOIN = "/init_weights_update_group"
LEAVE = "/destroy_weights_update_group"
BROADCAST = "/update_weights_from_distributed"
PROBE_WINDOW = 10.0  # seconds that a server may still answer after one of its processes died
PROBE_TIMEOUT = 5.0  # seconds


class ServerGroups:
    """Process groups in which this rank, as rank 0 of the group, broadcasts to ranks of servers.

    token: Beginning of the groups' names, the same on all stages. urls: The servers. is_broken:
    True once a round has failed; the groups cannot be used again. invited: Group name -> servers
    that join by SGLang's own request. The megavlm loaders join when they first receive.
    """

    def __init__(self, token: str, stage: int, servers: Servers) -> None:
        self.token, self.urls = token, {receiver.url for receiver in servers.live}
        self.is_broken = False
        self.invited: dict[str, tuple[str, ...]] = {}
        self._prefix, self._servers = f"{token}_{stage}", servers
        self._names: dict[tuple[Sequence[str], int | None], str] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._store: dist.TCPStore | None = None  # used by this rank to join groups

    def name(self, urls: tuple[str, ...], rank: int | None) -> str:
        """Return the name of the group with rank `rank` of each server, or with all ranks if
        None.
        """
        return self._names.setdefault((urls, rank), f"{self._prefix}_{len(self._names)}")

    def group(
        self, name: str, size: int, rendezvous: Rendezvous, limit: timedelta
    ) -> dist.ProcessGroup:
        """Return a group. This rank joins it first if it has not yet."""
        if name not in self._groups:
            # Joining blocks the store's connection, while the transport must keep polling its own,
            # so joining needs a separate connection. All groups share one, because torch resolves
            # host names for each new connection.
            if self._store is None:
                self._store = connect(rendezvous.host, rendezvous.port, limit)
            self._groups[name] = join(
                self._store, name, 0, size, platform.backend(), limit, SERVERS_GROUP
            )
        return self._groups[name]

    def leave(self) -> None:
        """Leave all groups. Closing the connections ends receives that servers still wait for."""
        for group in [*self._groups.values()]:  # a copy: a thread may still be joining one
            group.abort()
            dist.destroy_process_group(group)
        for name, urls in self.invited.items():
            for url in urls:
                with suppress(WeightSyncError):  # the server may be gone
                    self._servers.request(url, LEAVE, {"group_name": name}, timeout=CLEANUP_TIMEOUT)
        for known in (self._names, self._groups, self.invited):
            known.clear()
        self._store = None


class DistributedTransport:
    """Broadcasts buckets in process groups with the servers.

    Groups are kept until the set of servers changes, or one of them fails or restarts.

    address: Address of rank 0's machine, as servers and other ranks reach it. timeout: Seconds that
    joining a group and each round may take.
    """

    traits = TRANSPORT_TRAITS["distributed"]

    def __init__(self, address: str, *, timeout: float = 300.0) -> None:
        self._address, self._timeout = address, timeout
        self._store: dist.TCPStore | None = None
        self._count = 0  # number of attempts of this rank
        self._groups: ServerGroups | None = None

    def open(self, servers: Servers, attempt: SyncAttempt) -> Delivery:
        rendezvous, rank = attempt.rendezvous, dist.get_rank()
        self._count += 1
        if self._store is None:
            host, port = (self._address, 0) if rank == 0 else (rendezvous.host, rendezvous.port)
            limit = timedelta(seconds=self._timeout)
            try:
                self._store = connect(host, port, limit, master=rank == 0)
            except RuntimeError as error:
                raise WeightSyncError(f"the store of rank 0 cannot be reached: {error}") from error
        if rank == 0:
            token = self._token(attempt)
            rendezvous = Rendezvous(self._address, self._store.port, token, self._count)
        groups, stage = self._groups, attempt.senders.index(rank)
        if groups is None or groups.token != rendezvous.token:
            self.close()
            groups = self._groups = ServerGroups(rendezvous.token, stage, servers)
        messages = StageMessages(self._store, rendezvous, self._timeout)
        return DistributedDelivery(servers, attempt, stage, groups, messages, self._timeout)

    def close(self) -> None:
        if self._groups is not None:
            self._groups.leave()

    def _token(self, attempt: SyncAttempt) -> str:
        """Return the token of the last attempt's groups if they can be used again, or a new one."""
        groups = self._groups
        # A server that needs all tensors may have restarted since it joined a group.
        unsure = any(receiver.needs_all for receiver in attempt.receivers)
        if groups is None or groups.is_broken or unsure or groups.urls != {*attempt.urls}:
            return f"megavlm_{secrets.token_hex(4)}"
        return groups.token


class DistributedDelivery(Delivery):
    """Rounds of one stage in an attempt. Rank 0 makes the requests to the servers.

    stage: This rank's pipeline stage. timeout: Seconds that joining a group and each round may
    take.
    """

    def __init__(
        self,
        servers: Servers,
        attempt: SyncAttempt,
        stage: int,
        groups: ServerGroups,
        messages: StageMessages,
        timeout: float,
    ) -> None:
        self.rendezvous = messages.rendezvous
        self._servers, self._attempt, self._stage = servers, attempt, stage
        self._groups, self._messages, self._timeout = groups, messages, timeout
        self._round = 0
        self._sending = {*range(1, len(attempt.senders))}  # on rank 0: stages with more buckets
        self._pool = ThreadPoolExecutor(len(attempt.urls), "requests")

    def send(self, bucket: TensorBucket) -> int:
        parts = bucket_parts(bucket, self._attempt, self._groups.name)
        with self._round_failures():
            if self._stage:
                self._messages.send(self._round, self._stage, [part.values() for part, _ in parts])
                self._round += 1
            broadcast = self._start_broadcast(parts)
            if not self._stage:
                self._ask(self._requests([part for part, _ in parts]), broadcast)
            self._wait({broadcast: ""})
        return sum(tensor.nbytes * (part.size - 1) for part, tensor in parts)

    def finish(self) -> None:
        with self._round_failures():
            if self._stage:
                self._messages.send(self._round, self._stage, None)
            while self._sending and not self._stage:
                self._ask(self._requests([]))
        self._pool.shutdown(wait=False)

    # Sending and waiting

    def _requests(self, own: Sequence[BroadcastPart]) -> list[tuple[str, Bodies]]:
        """Return rank 0's requests of a round: they let servers receive the parts of all stages.
        own: Parts of rank 0's own stage.
        """
        parts = [*own]
        for stage in sorted(self._sending):
            message = self._messages.receive(self._round, stage)
            if message is None:
                self._sending.discard(stage)
            else:
                parts += map(BroadcastPart.of, message)
        bodies, answers = slice_requests(
            parts, self._attempt, self.rendezvous, number=self._round, timeout=self._timeout
        )
        self._messages.expect(answers)
        self._round += 1
        requests = [(UPDATE, bodies)]
        for part in parts:
            if part.rank is None:
                if part.group not in self._groups.invited:
                    self._groups.invited[part.group] = part.urls
                    requests.append((JOIN, invitations(part, self._attempt, self.rendezvous)))
                requests.append((BROADCAST, whole_requests(part)))
        return requests

    def _start_broadcast(self, parts: Sequence[tuple[BroadcastPart, Tensor]]) -> "Future[None]":
        """Broadcast in a daemon thread, so that a broadcast that hangs does not keep the process
        alive.
        """
        future: Future[None] = Future()

        def run() -> None:
            platform.join(platform.device())
            try:
                self._broadcast(parts)
                future.set_result(None)
            except RuntimeError as error:
                future.set_exception(error)

        Thread(target=run, name="broadcast", daemon=True).start()
        return future

    def _broadcast(self, parts: Sequence[tuple[BroadcastPart, Tensor]]) -> None:
        works, limit = [], timedelta(seconds=self._timeout)
        for part, tensor in parts:
            group = self._groups.group(part.group, part.size, self.rendezvous, limit)
            content = tensor.to(platform.device()).view(torch.uint8)
            works.append(dist.broadcast(content, group=group, group_src=0, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        platform.synchronize()

    def _ask(
        self, requests: Sequence[tuple[str, Bodies]], broadcast: "Future[None] | None" = None
    ) -> None:
        """Send requests one after another, each to all its servers concurrently, and wait for the
        answers. Raises RoundFailure if a request, `broadcast` or another stage fails.
        """
        for path, bodies in requests:
            answers: dict[Future[Any], str] = {}
            for url, body in bodies.items():
                answers[self._pool.submit(self._servers.request, url, path, body)] = url
            self._wait(answers, broadcast)
        if refused := self._messages.refusals(all_answered=True):
            raise RoundFailure(refused)

    def _wait(
        self, awaited: "Mapping[Future[Any], str]", other: "Future[Any] | None" = None
    ) -> None:
        """Wait for futures. awaited: Future -> URL of the server that causes its failure, or "" if
        none does. Raises RoundFailure if one of them, `other` or another stage fails, or after the
        timeout.
        """
        deadline = time.monotonic() + self._timeout
        waiting = {*awaited}
        while waiting:
            _, waiting = wait(waiting, POLL, FIRST_EXCEPTION)
            failed = {url: error for future, url in awaited.items() if (error := _error(future))}
            if failed:
                refused = {url: str(error) for url, error in failed.items() if url}
                raise RoundFailure(refused, repr(next(iter(failed.values()))))
            if other is not None and (error := _error(other)):
                raise RoundFailure({}, repr(error))
            self._messages.check()
            if waiting and time.monotonic() > deadline:
                raise RoundFailure({}, f"weights were not sent within {self._timeout:g} s")

    # Failures

    @contextmanager
    def _round_failures(self) -> Iterator[None]:
        """Turn a RoundFailure into the end of the attempt, and raise WeightSyncError."""
        try:
            yield
        except RoundFailure as failure:
            self._give_up(failure)
            self._groups.leave()
            raise WeightSyncError(str(failure)) from failure

    def _give_up(self, failure: RoundFailure) -> None:
        """Tell the other stages about a failure. On rank 0, mark the dead servers as lost or, if
        none is dead, the servers that refused. Threads that still wait end at their own timeout.
        """
        self._groups.is_broken = True
        self._pool.shutdown(wait=False)
        self._messages.fail(str(failure))
        if self._stage:
            return
        dead: dict[str, str] = {}
        refused = {**failure.refused, **self._messages.refusals(all_answered=False)}
        deadline = time.monotonic() + (0.0 if refused else PROBE_WINDOW)
        while True:
            for url in self._attempt.urls:
                try:
                    self._servers.request(url, "/model_info", timeout=PROBE_TIMEOUT)
                except WeightSyncError as error:
                    dead[url] = str(error)
            if dead or time.monotonic() >= deadline:
                break
            time.sleep(0.2)
        for url, reason in (dead or refused).items():
            self._servers.lose(url, reason)


def _error(future: "Future[Any]") -> BaseException | None:
    return future.exception() if future.done() else None
