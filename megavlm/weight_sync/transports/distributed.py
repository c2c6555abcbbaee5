"""Transport by NCCL or gloo from the first rank of each pipeline stage, all stages at once.

SGLang's `update_weights_from_distributed` broadcasts whole tensors to every rank of a server, which
cuts them (its `load_format` knows no slices), and takes one group's tensors a request. So a server
with our loaders is sent slices another way: the first ranks of all servers, the second ranks, and
so on, each make a group with every stage, in which the stage broadcasts what these ranks store. A
rank receives from all stages at the same time, and stores every byte that it is sent.

Sending goes in rounds. In each, every stage has a bucket ready and says in rank 0's store what is
in it; rank 0 sends one request to each server, which receives all of them. As rank 0 alone makes
requests, all servers receive in the same order, and no broadcast waits for another. To a server
without our loaders rank 0 sends a request for each stage.
"""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_main import LOADERS
from megavlm.inference.server_support.megavlm_weights import join
from megavlm.parallel import platform
from megavlm.weight_sync.attempt import SyncAttempt, TensorBucket
from megavlm.weight_sync.server_api import CLEANUP_TIMEOUT, Servers
from megavlm.weight_sync.server_parameters import Flat, rank_slices
from megavlm.weight_sync.sglang_layout import ServerLayout, hub_tensors
from megavlm.weight_sync.transports.board import (
    POLL,
    Board,
    Meeting,
    Message,
    RoundFailure,
    connect,
)
from megavlm.weight_sync.transports.payload import payload
from megavlm.weight_sync.transports.tensor import UPDATE

BROADCAST = "/update_weights_from_distributed"
PROBE_WINDOW = 10.0  # seconds that a server whose process died may take to stop answering
PROBE_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class GroupPart:
    """GroupPart of a bucket that is broadcast in one group: to rank `rank` of each of the servers
    `urls`; None: to all their ranks.
    """

    urls: tuple[str, ...]
    rank: int | None
    flat: Flat


class DistributedTransport:
    """Broadcasts buckets in process groups with the servers.

    Groups last until the servers change, or one of them fails or restarts.

    address: of rank 0's machine, as servers and the other ranks see it. timeout: seconds that
    joining a group and each round may take.
    """

    by_stage = True
    in_session = True
    slices = True

    def __init__(self, address: str, *, timeout: float = 300.0) -> None:
        self._address, self._timeout = address, timeout
        self._limit = timedelta(seconds=timeout)
        self._store: dist.TCPStore | None = None
        self._token = ""  # of the groups' names
        self._count = 0  # attempts of this rank
        self._urls: set[str] = set()  # the servers of the groups
        self._is_broken = False
        self._names: dict[tuple[tuple[str, ...], int | None], str] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}  # by name
        self._joined: dict[str, tuple[str, ...]] = {}  # by name, servers that joined by a request

    def open(self, servers: Servers, attempt: SyncAttempt) -> Meeting:
        meeting, rank = attempt.meeting, dist.get_rank()
        self._count += 1
        try:
            if self._store is None:
                host, port = (self._address, 0) if rank == 0 else (meeting.host, meeting.port)
                self._store = connect(host, port, self._limit, master=rank == 0)
        except RuntimeError as error:
            raise WeightSyncError(f"the store of rank 0 cannot be reached: {error}") from error
        if rank == 0:
            token = self._token
            # The process of a server that needs all may not be the one that joined.
            unsure = any(target.needs_all for target in attempt.targets)
            if unsure or self._is_broken or self._urls != {*attempt.urls}:
                token = f"megavlm_{secrets.token_hex(4)}"
            meeting = Meeting(self._address, self._store.port, token, self._count)
        if self._token != meeting.token:
            self._leave()
        self._servers, self._attempt = servers, attempt
        self._board, self._token = Board(self._store, meeting, self._timeout), meeting.token
        self._urls, self._is_broken = {*attempt.urls}, False
        self._stage, self._round = attempt.senders.index(rank), 0
        self._sending = {*range(1, len(attempt.senders))}  # on rank 0: other stages with buckets
        self._pool = ThreadPoolExecutor(len(attempt.urls), "requests")
        return meeting

    def send(self, bucket: TensorBucket) -> int:
        parts = self._parts(bucket)
        described = [self._described(part) for part in parts]
        try:
            if self._stage:
                self._board.say(self._round, self._stage, described)
                self._round += 1
            mine = self._start_broadcast(parts)
            for path, bodies in self._requests(described):
                self._ask(path, bodies, mine)
            self._wait({mine: ""})
        except RoundFailure as failure:
            self._give_up(failure)
            self._leave()
            raise WeightSyncError(str(failure)) from failure
        sizes = self._attempt.layouts
        return sum(
            part.flat.tensor.nbytes
            * (len(part.urls) if part.rank is not None else _num_ranks(part.urls, sizes))
            for part in parts
        )

    def finish(self) -> None:
        try:
            if self._stage:
                self._board.say(self._round, self._stage, None)
            while self._sending and not self._stage:
                for path, bodies in self._requests([]):
                    self._ask(path, bodies)
        except RoundFailure as failure:
            self._give_up(failure)
            self._leave()
            raise WeightSyncError(str(failure)) from failure
        self._pool.shutdown(wait=False)

    def close(self, attempt: SyncAttempt | None = None) -> None:
        if attempt is None:
            self._leave()

    # What is in a round

    def _parts(self, bucket: TensorBucket) -> list[GroupPart]:
        """Return what this rank broadcasts of a bucket. A part is never empty."""
        kinds: dict[tuple[ServerLayout, frozenset[str]] | None, list[str]] = {}
        for url in bucket.urls:
            names = self._attempt.parameters.get(url)
            kind = None if names is None else (self._attempt.layouts[url], names)
            kinds.setdefault(kind, []).append(url)
        parts: list[GroupPart] = []
        for kind, urls in kinds.items():
            if kind is None:
                parts.append(GroupPart((*urls,), None, Flat.of([], [*hub_tensors(bucket.tensors)])))
            else:
                flats = enumerate(rank_slices(bucket.tensors, *kind))
                parts += [
                    GroupPart((*urls,), rank, flat) for rank, flat in flats if len(flat.tensor)
                ]
        return parts

    def _described(self, part: GroupPart) -> dict[str, Any]:
        key = (part.urls, part.rank)
        name = f"{self._token}_{self._stage}_{len(self._names)}"
        sizes = self._attempt.layouts
        others = len(part.urls) if part.rank is not None else _num_ranks(part.urls, sizes)
        return {
            "group": self._names.setdefault(key, name),
            "size": 1 + others,
            "urls": part.urls,
            "rank": part.rank,
            "flat": part.flat.described(),
        }

    def _requests(self, own: Message) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the requests of a round on rank 0, whose answers are read when it goes on. `own`:
        the part of this stage.
        """
        if self._stage:
            return
        parts = [*own]
        for stage in sorted(self._sending):
            message = self._board.hear(self._round, stage)
            if message is None:
                self._sending.discard(stage)
            else:
                parts += message
        yield from self._sliced([part for part in parts if part["rank"] is not None])
        for part in parts:
            if part["rank"] is None:
                yield from self._whole(part)
        self._round += 1

    def _sliced(self, parts: Message) -> Iterator[tuple[str, dict[str, Any]]]:
        meeting, answers = self._board.meeting, dict[str, tuple[str, int]]()
        bodies = {}
        for place, url in enumerate(self._attempt.urls):
            if not any(url in part["urls"] for part in parts):
                continue
            contents = []
            for rank in range(self._attempt.layouts[url].tensor_parallel):
                key = meeting.answer(self._round, place, rank)
                answers[key] = (url, rank)
                task = {
                    "host": meeting.host,
                    "port": meeting.port,
                    "backend": platform.backend(),
                    "timeout": self._timeout,
                    "token": meeting.token,
                    "fault": meeting.fault,
                    "answer": key,
                    "receive": [
                        (part["group"], 1 + part["urls"].index(url), part["size"], part["flat"])
                        for part in parts
                        if url in part["urls"] and part["rank"] == rank
                    ],
                }
                contents.append(payload([(json.dumps(task), torch.empty(0))]))
            bodies[url] = {
                "serialized_named_tensors": contents,
                "load_format": LOADERS[1],
                "flush_cache": False,
            }
        self._board.expect(answers)
        if bodies:
            yield UPDATE, bodies
        if refused := self._board.refusals(all_answered=True):
            raise RoundFailure(refused, "")

    def _whole(self, part: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        meeting, name, urls = self._board.meeting, part["group"], tuple(part["urls"])
        if name not in self._joined:
            invitation = {
                "master_address": meeting.host,
                "master_port": meeting.port,
                "world_size": part["size"],
                "group_name": name,
                "backend": platform.backend(),
            }
            self._joined[name] = urls
            yield (
                "/init_weights_update_group",
                {
                    url: invitation
                    | {"rank_offset": 1 + _num_ranks(urls[:place], self._attempt.layouts)}
                    for place, url in enumerate(urls)
                },
            )
        flat = part["flat"]
        body = {
            "names": [name for name, _ in flat["whole"]],
            "dtypes": [flat["dtype"]] * len(flat["whole"]),
            "shapes": [shape for _, shape in flat["whole"]],
            "group_name": name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        yield BROADCAST, dict.fromkeys(urls, body)

    # Sending and waiting

    def _start_broadcast(self, parts: Sequence[GroupPart]) -> "Future[None]":
        """Broadcast in a thread that does not keep the process when others wait in vain."""
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

    def _broadcast(self, parts: Sequence[GroupPart]) -> None:
        works = []
        for part in parts:
            name = self._names[part.urls, part.rank]
            if name not in self._groups:
                size = self._described(part)["size"]
                self._groups[name] = self._join(name, size)
            flat = part.flat.tensor.to(platform.device()).view(torch.uint8)
            works.append(dist.broadcast(flat, group=self._groups[name], group_src=0, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        platform.synchronize()

    def _join(self, name: str, size: int) -> dist.ProcessGroup:
        # Of its own, as this one blocks while it joins and the other is listened to.
        store = connect(self._board.meeting.host, self._board.meeting.port, self._limit)
        return join(store, name, 0, size, platform.backend(), self._limit)

    def _ask(self, path: str, bodies: Mapping[str, Any], mine: "Future[Any] | None" = None) -> None:
        """Send requests at once and wait for the answers, and for no failure of `mine`."""
        theirs: dict[Future[Any], str] = {}
        for url, body in bodies.items():
            theirs[self._pool.submit(self._servers.request, url, path, body)] = url
        self._wait(theirs, mine)

    def _wait(self, theirs: "Mapping[Future[Any], str]", mine: "Future[Any] | None" = None) -> None:
        """Wait for `theirs`. Raises RoundFailure if they, `mine` or another stage fails."""
        deadline = time.monotonic() + self._timeout
        waiting = {*theirs}
        while waiting:
            _, waiting = wait(waiting, POLL, FIRST_EXCEPTION)
            failed = {future: error for future in theirs if (error := _error(future))}
            if failed:
                refused = {theirs[future]: str(error) for future, error in failed.items()}
                reason = repr(next(iter(failed.values())))
                raise RoundFailure({url: why for url, why in refused.items() if url}, reason)
            if mine is not None and (error := _error(mine)):
                raise RoundFailure({}, repr(error))
            self._board.check()
            if waiting and time.monotonic() > deadline:
                raise RoundFailure({}, f"weights were not sent within {self._timeout:g} s")

    # Failures

    def _give_up(self, failure: "RoundFailure") -> None:
        """Tell the other stages, and on rank 0 lose the servers that are dead or, if none is, those
        that refused. Threads that wait are left to their own timeout.
        """
        self._is_broken = True
        self._pool.shutdown(wait=False)
        self._board.fail(str(failure))
        if self._stage:
            return
        dead: dict[str, str] = {}
        refused = {**failure.refused, **self._board.refusals(all_answered=False)}
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

    def _leave(self) -> None:
        """Leave all groups. What servers still wait for ends, as their connections are closed."""
        for group in [*self._groups.values()]:  # a thread may still join one
            group.abort()
            dist.destroy_process_group(group)
        for name, urls in self._joined.items():
            for url in urls:
                with suppress(WeightSyncError):  # the server may be gone
                    self._servers.request(
                        url,
                        "/destroy_weights_update_group",
                        {"group_name": name},
                        timeout=CLEANUP_TIMEOUT,
                    )
        self._names.clear()
        self._groups.clear()
        self._joined.clear()


def _error(future: "Future[Any]") -> BaseException | None:
    return future.exception() if future.done() else None


def _num_ranks(urls: Sequence[str], layouts: Mapping[str, ServerLayout]) -> int:
    return sum(layouts[url].tensor_parallel for url in urls)
