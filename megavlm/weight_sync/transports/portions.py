"""Sending of scheduled portions: what the transports through memory and through the network share.

Rank 0 serves a store on a port of its own and sends one request to each server. From then on every
sending rank and every rank of the servers follows the schedule, and they talk through the store:
any of them that fails sets `fault`, and all others give up.
"""

import hashlib
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_main import LOADER
from megavlm.inference.server_support.megavlm_weights import (
    GRACE,
    POLL,
    checksum,
    pack,
)
from megavlm.models.common.loading import EMBEDDING, HEAD
from megavlm.parallel import platform
from megavlm.weight_sync import block_fp8
from megavlm.weight_sync.gather import LocalShard
from megavlm.weight_sync.schedule import Piece, Server, SyncSchedule, make_schedule
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.transports.base import Sending
from megavlm.weight_sync.transports.payload import payload
from megavlm.weight_sync.update import SendReport, SyncAttempt

UPDATE = "/update_weights_from_tensor"
PROBE_WINDOW = 10.0  # seconds that a server may still answer after one of its processes died
PROBE_TIMEOUT = 5.0  # seconds
KEPT = 2  # schedules: of what training changes, and of everything


class Fault(Exception):
    """Failure of an attempt. lost: Reasons, by URL, of the servers that caused it. is_own: True if
    no server did.
    """

    def __init__(
        self, reason: str, lost: Mapping[str, str] | None = None, *, is_own: bool = False
    ) -> None:
        super().__init__(reason)
        self.lost, self.is_own = dict(lost or {}), is_own


@dataclass(frozen=True)
class Rendezvous:
    """Address of rank 0's store, and the names of one attempt in it.

    attempt: Prefix of the attempt's keys. group: Beginning of the name of the process group with
    the servers.
    """

    host: str
    port: int
    attempt: str
    group: str

    @property
    def fault(self) -> str:
        return f"{self.attempt}/fault"

    def stream(self, index: int) -> str:
        """Return the prefix of a stream's keys."""
        return f"{self.attempt}/{index}"

    def answer(self, server: int, rank: int) -> str:
        """Return the key of a server rank's answer."""
        return f"{self.attempt}/answers/{server}/{rank}"


class PortionTransport:
    """Sends every rank's own shards, by `make_schedule`. timeout: Seconds for each portion."""

    def __init__(self, *, timeout: float = 300.0) -> None:
        self._timeout = timeout
        self._attempts = 0
        self._stores: dict[str, dist.TCPStore] = {}
        self._schedules: dict[object, SyncSchedule] = {}
        # On rank 0: digests of the plans that each rank of a server has.
        self._plans: dict[tuple[str, int], list[str]] = defaultdict(list)
        self._answers: dict[tuple[str, int], Any] = {}  # of the last attempt, on rank 0
        self._progress = 0.0  # time.monotonic() at the last portion

    def prepare(self, servers: Servers, attempt: SyncAttempt) -> Rendezvous:
        limit = timedelta(seconds=self._timeout)
        if not self._stores:
            self._host = _own_address(attempt.urls)
            self._stores["polls"] = dist.TCPStore(
                self._host, 0, is_master=True, timeout=limit, wait_for_workers=False
            )
        for receiver in attempt.receivers:
            if receiver.needs_all:  # it may be a new process
                for key in [key for key in self._plans if key[0] == receiver.url]:
                    del self._plans[key]
        self._attempts += 1
        port = self._stores["polls"].port
        return Rendezvous(self._host, port, str(self._attempts), self._group_name(attempt))

    def send(self, sending: Sending) -> SendReport:
        attempt, rank = sending.attempt, dist.get_rank()
        schedule = self._schedule(sending)
        sums: dict[int, list[list[int]]] = {}
        mine = [x for x in schedule.streams if rank in (x.holder, x.sender)]
        work: Future[None] = Future()
        requests: dict[Future[Any], str] = {}
        pool = ThreadPoolExecutor(max(1, len(attempt.loading)), "requests")
        error, is_own, lost = None, False, dict[str, str]()
        self.note_progress()
        try:
            store = self._store("polls", attempt.rendezvous)
            if sending.servers is not None:
                requests = self._request(sending, schedule, pool)
            if mine:
                work = _in_thread(lambda: self._send(sending, schedule, sums))
            else:
                work.set_result(None)
            self._wait(work, requests, store, attempt.rendezvous)
            if sending.servers is not None:
                self._read_answers(sending, store, complete=True)
        except (Fault, RuntimeError) as fault:
            error, is_own = str(fault), getattr(fault, "is_own", False)
            lost = self._give_up(fault, sending, work, requests)
        pool.shutdown(wait=False)
        readers = {number: len(target.urls) for number, target in enumerate(schedule.targets)}
        held = [x for x in mine if x.sender == rank]
        return SendReport(
            sum(stream.nbytes * readers[stream.target] for stream in held),
            schedule.tensors if rank == 0 else 0,
            sums,
            lost,
            error,
            is_own,
        )

    def complete(self, sending: Sending, reports: Sequence[SendReport]) -> int:
        assert sending.servers is not None
        servers, schedule = sending.servers, self._schedule(sending)
        sent = {index: sums for report in reports for index, sums in report.sums.items()}
        count = 0
        for (url, rank), answer in self._answers.items():
            names = set()
            for index, held in zip(schedule.to(url, rank), answer["sums"], strict=True):
                portions = schedule.streams[index].portions
                for pieces, mine, theirs in zip(portions, sent[index], held, strict=True):
                    names |= {piece.name for piece in pieces if not piece.whole}
                    if mine != theirs:
                        first, last = pieces[0].name, pieces[-1].name
                        where = first if first == last else f"{first} or another up to {last}"
                        servers.mismatched.add(url)
                        servers.lose(
                            url,
                            f"{url}: checksum mismatch on rank {rank} in {where}",
                        )
            count += len(names)
        return count

    def close(self) -> None:
        """Release this rank's resources, at the end of the run."""

    # What the transports differ in

    def _servers(self, attempt: SyncAttempt) -> list[Server]:
        raise NotImplementedError

    def _send(
        self, sending: Sending, schedule: SyncSchedule, sums: dict[int, list[list[int]]]
    ) -> None:
        """Send this rank's streams, in a thread, and add the checksums of what it holds. Raises
        Fault or RuntimeError.
        """
        raise NotImplementedError

    def _group_name(self, attempt: SyncAttempt) -> str:
        return ""

    def _group(self, schedule: SyncSchedule, url: str, rank: int, token: str) -> Any:
        """Return the `group` of a task. token: `Rendezvous.group`."""
        return None

    def _abort(self, work: "Future[None]") -> None:
        """End this rank's sending after a failure. work: The result of `_send`."""
        wait([work], self._timeout)

    # Rank 0's requests

    def _request(
        self, sending: Sending, schedule: SyncSchedule, pool: ThreadPoolExecutor
    ) -> "dict[Future[Any], str]":
        """Send the update to all servers."""
        assert sending.servers is not None
        attempt, servers = sending.attempt, sending.servers
        limit = self._timeout * (schedule.rounds + 1)
        requests = {}
        contents: dict[int, tuple[str, Any]] = {}
        for place, url in enumerate(attempt.loading):
            tasks = []
            for rank in range(attempt.layouts[url].tensor_parallel):
                (number,) = [
                    number
                    for number, target in enumerate(schedule.targets)
                    if target.rank == rank and url in target.urls
                ]
                if number not in contents:
                    contents[number] = _content(schedule, number)
                task = self._task(sending, schedule, place, rank, *contents[number])
                tasks.append(payload([(json.dumps(task), torch.empty(0))]))
            body = {
                "serialized_named_tensors": tasks,
                "load_format": LOADER,
                "weight_version": attempt.version,
                # Requests name the version of their prefixes, so that old ones are not reused.
                # Only retracted requests keep the name of the old version.
                "flush_cache": sending.settings.pause == "retract",
            }
            requests[pool.submit(servers.request, url, UPDATE, body, timeout=limit)] = url
        return requests

    def _task(
        self,
        sending: Sending,
        schedule: SyncSchedule,
        place: int,
        rank: int,
        digest: str,
        content: Any,
    ) -> dict[str, Any]:
        rendezvous, url = sending.attempt.rendezvous, sending.attempt.loading[place]
        task = {
            "host": rendezvous.host,
            "port": rendezvous.port,
            "timeout": self._timeout,
            "attempt": rendezvous.attempt,
            "answer": rendezvous.answer(place, rank),
            "streams": [
                (
                    rendezvous.stream(index),
                    schedule.targets[schedule.streams[index].target].urls.index(url),
                )
                for index in schedule.to(url, rank)
            ],
            "group": self._group(schedule, url, rank, rendezvous.group),
            "plan": digest,
        }
        known = self._plans[url, rank]
        if digest not in known:
            task["content"] = content
            known[:] = [*known, digest][-KEPT:]
        return task

    def _read_answers(self, sending: Sending, store: dist.Store, *, complete: bool) -> None:
        """Read the answers of the servers' ranks. Raises Fault if some have failed.

        complete: True if all must have answered; a rank without an answer could not reach rank 0.
        """
        attempt, refused = sending.attempt, dict[str, str]()
        self._answers = {}
        rendezvous = attempt.rendezvous
        for place, url in enumerate(attempt.loading):
            for rank in range(attempt.layouts[url].tensor_parallel):
                key = rendezvous.answer(place, rank)
                answer = {"error": f"it did not reach {rendezvous.host}:{rendezvous.port}"}
                if store.check([key]):
                    answer = json.loads(store.get(key))
                    store.delete_key(key)
                elif not complete:
                    continue
                self._answers[url, rank] = answer
                if "error" in answer:
                    refused[url] = f"{url} did not load weights on its rank {rank}: " + str(
                        answer["error"]
                    )
        if refused:
            raise Fault("; ".join(refused.values()), refused)

    # Waiting and failures

    def note_progress(self) -> None:
        """Note that a portion was sent."""
        self._progress = time.monotonic()

    def _store(self, use: str, rendezvous: Rendezvous) -> dist.TCPStore:
        """Return this rank's connection to the store for a use, because waiting blocks it for all
        its users.
        """
        if use not in self._stores:
            limit = timedelta(seconds=self._timeout)
            self._stores[use] = dist.TCPStore(
                rendezvous.host, rendezvous.port, is_master=False, timeout=limit
            )
        return self._stores[use]

    def _wait(
        self,
        work: "Future[None]",
        requests: "Mapping[Future[Any], str]",
        store: dist.Store,
        rendezvous: Rendezvous,
    ) -> None:
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
            if store.check([rendezvous.fault]):
                fault = json.loads(store.get(rendezvous.fault))
                raise Fault(fault["reason"], fault["lost"])
            if work in waiting and time.monotonic() > self._progress + self._timeout:
                raise Fault(f"no portion was sent for {self._timeout:g} s")

    def _give_up(
        self,
        fault: Exception,
        sending: Sending,
        work: "Future[None]",
        requests: "Mapping[Future[Any], str]",
    ) -> dict[str, str]:
        """Tell the other ranks about a failure. On rank 0, return the servers that caused it: dead
        ones, or if there is none, those that refused.
        """
        lost, rendezvous = dict(getattr(fault, "lost", {})), sending.attempt.rendezvous
        store = self._stores.get("polls")
        if store is not None and not store.check([rendezvous.fault]):
            store.set(rendezvous.fault, json.dumps({"reason": str(fault), "lost": lost}))
        self._abort(work)
        if sending.servers is None or store is None:
            return lost
        wait(requests, GRACE)
        for future, url in requests.items():
            if future.done() and (failure := future.exception()):
                lost.setdefault(url, str(failure))
        try:
            self._read_answers(sending, store, complete=False)
        except Fault as refusal:
            lost = refusal.lost | lost
        # A rank whose server died sees only a broken connection, and names no server. Then the
        # servers are probed for a while, because a dying server may still answer. If a server is
        # known to have failed, one round of probes tells whether it is dead or refused: dead ones
        # go first, since their death may be why the others refused.
        dead: dict[str, str] = {}
        deadline = time.monotonic() + (0.0 if lost else PROBE_WINDOW)
        while True:
            for url in sending.attempt.loading:
                try:
                    sending.servers.request(url, "/model_info", timeout=PROBE_TIMEOUT)
                except WeightSyncError as error:
                    dead[url] = lost.get(url, str(error))
            if dead or time.monotonic() >= deadline:
                return dead or lost
            time.sleep(0.2)

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


class Packer:
    """Packs portions of this rank's shards. A shard that several streams need in a round is made
    once, because a merged adapter is computed for it.

    dtype: The dtype that shards are quantised from.
    """

    def __init__(self, shards: Mapping[int, LocalShard], dtype: torch.dtype) -> None:
        self._shards, self._dtype = shards, dtype
        self._made: dict[int, Tensor] = {}
        self.sums: dict[int, list[Tensor]] = defaultdict(list)

    def pack(self, stream: int, portion: Sequence[Piece], buffer: Tensor) -> Tensor:
        """Pack a portion, and return its part of the buffer. Raises Fault if there is no memory for
        it.
        """
        parts = []
        try:
            for piece in portion:
                if piece.entry not in self._made:
                    self._made[piece.entry] = self._shards[piece.entry]()
                part = self._made[piece.entry].narrow(
                    piece.dim, piece.source, piece.length * piece.stride
                )
                if piece.form != "plain":
                    quantise = block_fp8.values if piece.form == "values" else block_fp8.scales
                    part = quantise(part.to(self._dtype))
                parts.append(part)
            pack(parts, buffer, [piece.dtype for piece in portion])
            compared = sum(piece.nbytes for piece in portion if not piece.whole)
            self.sums[stream].append(checksum(buffer[:compared]))
        except RuntimeError as error:
            raise Fault(f"weights could not be packed: {error}", is_own=True) from error
        return buffer[: size_of(portion)]

    def next_round(self) -> None:
        self._made.clear()

    def read_sums(self) -> dict[int, list[list[int]]]:
        """Return the checksums of all portions by stream."""
        return {index: torch.stack(sums).tolist() for index, sums in self.sums.items()}


def size_of(portion: Sequence[Piece]) -> int:
    """Return the bytes of a portion."""
    return sum(piece.nbytes for piece in portion)


def _own_address(urls: Sequence[str]) -> str:
    """Return this machine's address as servers and other ranks reach it. It is numeric where a
    server is on another machine, because torch may take seconds to look up a name.
    """
    for url in urls:
        parts = urlsplit(url)
        host = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
        if not ip_address(host[4][0]).is_loopback:
            with socket.socket(host[0], socket.SOCK_DGRAM) as route:
                route.connect(host[4])  # sends nothing
                return str(route.getsockname()[0])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return "127.0.0.1" if local == dist.get_world_size() else os.environ["MASTER_ADDR"]


def _content(schedule: SyncSchedule, number: int) -> tuple[str, Any]:
    """Return the digest and the content of a target's plan, as the loader reads it."""
    names: dict[str, int] = {}
    described, streams = [], []
    for stream in schedule.streams:
        if stream.target != number:
            continue
        portions = []
        for portion in stream.portions:
            pieces = []
            for piece in portion:
                if piece.name not in names:
                    names[piece.name] = len(names)
                    dtype = str(piece.dtype).removeprefix("torch.")
                    described.append((piece.name, piece.shape, dtype, piece.whole))
                place = names[piece.name]
                pieces.append((place, piece.row, piece.dim, piece.start, piece.length))
            portions.append(pieces)
        streams.append(portions)
    copies = {EMBEDDING: HEAD} if schedule.targets[number].layout.tied_embeddings else {}
    content = {
        "names": described,
        "full": schedule.targets[number].full,
        "rounds": schedule.rounds,
        "streams": streams,
        "copies": copies,
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16], content


def _in_thread(work: Callable[[], None]) -> "Future[None]":
    """Run `work` in a daemon thread, so that a transfer that hangs does not keep the process
    alive.
    """
    future: Future[None] = Future()

    def run() -> None:
        platform.join(platform.device())
        try:
            with torch.no_grad():
                work()
            future.set_result(None)
        except (Fault, OSError, RuntimeError, ValueError) as error:
            future.set_exception(error)

    Thread(target=run, name="sender", daemon=True).start()
    return future
