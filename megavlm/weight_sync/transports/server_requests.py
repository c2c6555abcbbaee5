"""Rank 0's requests of an update: one to each server, and the answers of the servers' ranks."""

import hashlib
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any

import torch

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_main import LOADER
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.inference.server_support.megavlm_weights import GRACE
from megavlm.models.common.loading import EMBEDDING, HEAD
from megavlm.weight_sync.schedule import SyncSchedule
from megavlm.weight_sync.transports.base import Sending
from megavlm.weight_sync.transports.payload import payload
from megavlm.weight_sync.transports.store import Fault, StoreClient
from megavlm.weight_sync.update import SyncAttempt

UPDATE = "/update_weights_from_tensor"
PROBE_WINDOW = 10.0  # seconds that a server may still answer after one of its processes died
PROBE_TIMEOUT = 5.0  # seconds
KEPT = 2  # plans of a server's rank, and schedules: of what training changes, and of everything

Requests = dict[Future[Any], str]  # the URL of each request's server
GroupOf = Callable[[SyncSchedule, str, int, str], Any]  # BucketTransport._group


class ServerRequests:
    """Sends the requests. answers: Those of the last attempt, by URL and rank."""

    def __init__(self, store: StoreClient, group_of: GroupOf, timeout: float) -> None:
        self._store, self._group_of, self._timeout = store, group_of, timeout
        # Digests of the plans that each rank of a server has.
        self._plans: dict[tuple[str, int], deque[str]] = defaultdict(lambda: deque(maxlen=KEPT))
        self.answers: dict[tuple[str, int], Any] = {}

    def forget(self, receivers: Iterable[Receiver]) -> None:
        """Forget the plans of receivers that may be new processes."""
        new = {receiver.url for receiver in receivers if receiver.needs_all}
        for key in [key for key in self._plans if key[0] in new]:
            del self._plans[key]

    def send(self, sending: Sending, schedule: SyncSchedule, base: str | None) -> Requests:
        """Send the update to all servers. base: The attempt whose changes are sent, if any."""
        assert sending.servers is not None
        attempt, limit = sending.attempt, self._timeout * (schedule.rounds + 1)
        pool = ThreadPoolExecutor(max(1, len(attempt.loading)), "requests")
        cached, requests = cache(partial(content_of, schedule)), dict[Future[Any], str]()
        for index, url in enumerate(attempt.loading):
            ranks = range(attempt.layouts[url].tensor_parallel)
            tasks = [
                self._task(attempt, schedule, index, rank, cached) | {"base": base}
                for rank in ranks
            ]
            body = {
                "serialized_named_tensors": [
                    payload([(json.dumps(task), torch.empty(0))]) for task in tasks
                ],
                "load_format": LOADER,
                "weight_version": attempt.version,
                # Requests name the version of their prefixes, so that old ones are not reused.
                # Only retracted requests keep the name of the old version.
                "flush_cache": sending.settings.pause_mode == "retract",
            }
            future = pool.submit(sending.servers.request, url, UPDATE, body, timeout=limit)
            requests[future] = url
        pool.shutdown(wait=False)
        return requests

    def _task(
        self,
        attempt: SyncAttempt,
        schedule: SyncSchedule,
        place: int,
        rank: int,
        contents: Callable[[int], tuple[str, Any]],
    ) -> dict[str, Any]:
        rendezvous, url = attempt.rendezvous, attempt.loading[place]
        number = schedule.target(url, rank)
        reader = schedule.targets[number].urls.index(url)
        digest, content = contents(number)
        task = {
            "host": rendezvous.host,
            "port": rendezvous.port,
            "timeout": self._timeout,
            "attempt": rendezvous.attempt,
            "answer": rendezvous.answer(place, rank),
            "streams": [(rendezvous.stream(index), reader) for index in schedule.to(url, rank)],
            "group": self._group_of(schedule, url, rank, rendezvous.group),
            "plan": digest,
        }
        known = self._plans[url, rank]
        if digest not in known:
            task["content"] = content
            known.append(digest)
        return task

    def read_answers(self, attempt: SyncAttempt, *, complete: bool) -> None:
        """Read the answers of the servers' ranks. Raises Fault if some have failed.

        complete: True if all must have answered; a rank without an answer could not reach rank 0.
        """
        rendezvous, refused = attempt.rendezvous, dict[str, str]()
        absent = {"error": f"it did not reach {rendezvous.host}:{rendezvous.port}"}
        self.answers = {}
        for index, url in enumerate(attempt.loading):
            for rank in range(attempt.layouts[url].tensor_parallel):
                answer = self._store.take_answer(rendezvous, index, rank)
                if answer is None and not complete:
                    continue
                self.answers[url, rank] = answer = answer or absent
                if "error" in answer:
                    error = f"did not load weights on its rank {rank}: {answer['error']}"
                    refused[url] = f"{url} {error}"
        if refused:
            raise Fault("; ".join(refused.values()), refused)

    def find_lost(
        self, sending: Sending, requests: Requests, lost: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the servers that caused a failure: dead ones, or if there is none, those that
        refused. lost: The servers that are known.
        """
        assert sending.servers is not None
        found = dict(lost)
        wait(requests, GRACE)
        for future, url in requests.items():
            if future.done() and (failure := future.exception()):
                found.setdefault(url, str(failure))
        try:
            self.read_answers(sending.attempt, complete=False)
        except Fault as refusal:
            found = refusal.lost | found
        # A rank whose server died sees only a broken connection, and names no server. Then the
        # servers are probed for a while, because a dying server may still answer. If a server is
        # known to have failed, one round of probes tells whether it is dead or refused: dead ones
        # go first, since their death may be why the others refused.
        dead: dict[str, str] = {}
        deadline = time.monotonic() + (0.0 if found else PROBE_WINDOW)
        while True:
            for url in sending.attempt.loading:
                try:
                    sending.servers.request(url, "/model_info", timeout=PROBE_TIMEOUT)
                except WeightSyncError as error:
                    dead[url] = found.get(url, str(error))
            if dead or time.monotonic() >= deadline:
                return dead or found
            time.sleep(0.2)


def content_of(schedule: SyncSchedule, number: int) -> tuple[str, Any]:
    """Return the digest and the content of a target's plan, as the loader reads it."""
    names: dict[str, int] = {}
    described, streams = [], []
    for stream in schedule.streams:
        if stream.target != number:
            continue
        buckets = []
        for bucket in stream.buckets:
            pieces = []
            for piece in bucket:
                if piece.name not in names:
                    names[piece.name] = len(names)
                    dtype = str(piece.dtype).removeprefix("torch.")
                    described.append((piece.name, piece.shape, dtype, piece.whole))
                place = names[piece.name]
                pieces.append((place, piece.row, piece.dim, piece.start, piece.length))
            buckets.append(pieces)
        streams.append(buckets)
    copies = {EMBEDDING: HEAD} if schedule.targets[number].layout.tied_embeddings else {}
    content = {
        "names": described,
        "full": schedule.targets[number].full,
        "rounds": schedule.rounds,
        "streams": streams,
        "copies": copies,
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16], content
