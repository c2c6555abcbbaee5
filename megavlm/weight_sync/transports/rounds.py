"""Rounds of the distributed transport: the messages in the store that rank 0 serves, the parts that
stages broadcast, and the bodies of rank 0's requests that let servers receive them.

Messages are exchanged between sending ranks, and with ranks of servers.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.inference.server_main import LOADERS
from megavlm.parallel import platform
from megavlm.weight_sync.server_parameters import Flat, rank_slices
from megavlm.weight_sync.sglang_layout import ServerLayout, hub_tensors
from megavlm.weight_sync.transports.payload import payload
from megavlm.weight_sync.update import SyncAttempt, TensorBucket

POLL = 0.02  # seconds between reads of the store

Bodies = dict[str, dict[str, Any]]  # by URL
Message = list[dict[str, Any]]  # the parts that a stage broadcasts in a round


class RoundFailure(Exception):
    """Failure of a round. refused: Reasons that servers gave, by URL."""

    def __init__(self, refused: Mapping[str, str], reason: str = "") -> None:
        super().__init__(reason or "; ".join(refused.values()))
        self.refused = refused


@dataclass(frozen=True)
class Rendezvous:
    """Address of rank 0's store, and the keys of one attempt in it.

    token: Beginning of the names of process groups. attempt: Number of the attempt.
    """

    host: str
    port: int
    token: str
    attempt: int

    @property
    def fault(self) -> str:
        """Key of the failure's reason. Once it is set, the attempt ends on all ranks."""
        return f"{self.attempt}/fault"

    def message(self, number: int, stage: int) -> str:
        """Return the key of a stage's message of round `number`."""
        return f"{self.attempt}/{number}/{stage}"

    def answer(self, number: int, server: int, rank: int) -> str:
        """Return the key of a server rank's answer: "" for success, or why it did not load a
        round.
        """
        return f"{self.attempt}/{number}/answers/{server}/{rank}"


class StageMessages:
    """Messages from and to a sending rank in one attempt. timeout: Seconds to wait for a
    message.
    """

    def __init__(self, store: dist.Store, rendezvous: Rendezvous, timeout: float) -> None:
        self.rendezvous = rendezvous
        self._store, self._timeout = store, timeout
        self._answers: dict[str, tuple[str, int]] = {}

    def send(self, number: int, stage: int, message: Message | None) -> None:
        """Tell rank 0 the parts that a stage broadcasts in a round. None means that the stage has
        sent everything.
        """
        self.check()
        self._store.set(self.rendezvous.message(number, stage), json.dumps(message))

    def receive(self, number: int, stage: int) -> Message | None:
        """Return a stage's message of a round. Raises RoundFailure if none arrives in time."""
        key, deadline = self.rendezvous.message(number, stage), time.monotonic() + self._timeout
        while not self._store.check([key]):
            self.check()
            if time.monotonic() > deadline:
                raise RoundFailure({}, f"stage {stage} sent nothing for {self._timeout:g} s")
            time.sleep(POLL / 10)
        message: Message | None = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return message

    def check(self) -> None:
        """Raise RoundFailure if any rank has reported a failure."""
        if self._store.check([self.rendezvous.fault]):
            raise RoundFailure({}, self._store.get(self.rendezvous.fault).decode())

    def fail(self, reason: str) -> None:
        """Report a failure, so that the attempt ends on all ranks."""
        self._store.set(self.rendezvous.fault, reason)

    def expect(self, answers: Mapping[str, tuple[str, int]]) -> None:
        """Set the answers to expect in a round: key -> (URL, rank of the server)."""
        self._answers = dict(answers)

    def refusals(self, *, all_answered: bool) -> dict[str, str]:
        """Return, by URL, why ranks of servers did not load their parts in the last round.

        all_answered: If true, every rank must have answered; a rank without an answer could not
        reach rank 0.
        """
        refused: dict[str, str] = {}
        address = f"{self.rendezvous.host}:{self.rendezvous.port}"
        for key, (url, rank) in self._answers.items():
            answer = f"it did not reach {address}" if all_answered else ""
            if self._store.check([key]):
                answer = self._store.get(key).decode()
                self._store.delete_key(key)
            if answer:
                refused[url] = f"{url} did not load weights on its rank {rank}: {answer}"
        self._answers = {}
        return refused


def connect(host: str, port: int, timeout: timedelta, *, master: bool = False) -> dist.TCPStore:
    """Connect to rank 0's store. With `master`, serve the store; port 0 takes a free port."""
    return dist.TCPStore(host, port, is_master=master, timeout=timeout, wait_for_workers=False)


@dataclass(frozen=True)
class BroadcastPart:
    """One flat tensor of a bucket, broadcast by a stage in a group with ranks of servers.

    urls: The receiving servers. rank: Rank of each server that receives; None for all ranks. group:
    Name of the group. size: Number of ranks in the group, including the stage's sender. flat:
    Description by `Flat.described`.
    """

    urls: tuple[str, ...]
    rank: int | None
    group: str
    size: int
    flat: Mapping[str, Any]

    def values(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the part that `values` describes."""
        return cls(**{**values, "urls": tuple(values["urls"])})


def bucket_parts(
    bucket: TensorBucket, attempt: SyncAttempt, group: Callable[[tuple[str, ...], int | None], str]
) -> list[tuple[BroadcastPart, Tensor]]:
    """Split a bucket into non-empty broadcast parts, each with its tensor.

    group: Function that returns the group's name for some servers and a rank of them, or all ranks
    if None.
    """
    kinds: dict[tuple[ServerLayout, frozenset[str]] | None, list[str]] = {}
    for url in bucket.urls:
        names = attempt.parameters.get(url)
        kind = None if names is None else (attempt.layouts[url], names)
        kinds.setdefault(kind, []).append(url)
    parts = []
    for kind, members in kinds.items():
        urls, flats = tuple(members), dict[int | None, Flat]()
        if kind is None:
            flats[None] = Flat.of([], [*hub_tensors(bucket.tensors)])
            size = 1 + num_ranks(urls, attempt)
        else:
            flats.update(enumerate(rank_slices(bucket.tensors, *kind)))
            size = 1 + len(urls)
        for rank, flat in flats.items():
            if len(flat.tensor):
                part = BroadcastPart(urls, rank, group(urls, rank), size, flat.described())
                parts.append((part, flat.tensor))
    return parts


def slice_requests(
    parts: Sequence[BroadcastPart],
    attempt: SyncAttempt,
    rendezvous: Rendezvous,
    *,
    number: int,
    timeout: float,
) -> tuple[Bodies, dict[str, tuple[str, int]]]:
    """Build the requests to servers with the megavlm loaders, to receive the slices of all stages.
    Returns the bodies, and the keys in rank 0's store under which each (URL, rank) answers.

    number: Number of the round. timeout: Seconds for joining a group and receiving.
    """
    bodies, answers = Bodies(), dict[str, tuple[str, int]]()
    for place, url in enumerate(attempt.urls):
        mine = [part for part in parts if part.rank is not None and url in part.urls]
        if not mine:
            continue
        contents = []
        for rank in range(attempt.layouts[url].tensor_parallel):
            key = rendezvous.answer(number, place, rank)
            answers[key] = url, rank
            task = {
                "host": rendezvous.host,
                "port": rendezvous.port,
                "backend": platform.backend(),
                "timeout": timeout,
                "token": rendezvous.token,
                "fault": rendezvous.fault,
                "answer": key,
                "receive": [
                    (part.group, 1 + part.urls.index(url), part.size, part.flat)
                    for part in mine
                    if part.rank == rank
                ],
            }
            contents.append(payload([(json.dumps(task), torch.empty(0))]))
        bodies[url] = {
            "serialized_named_tensors": contents,
            "load_format": LOADERS[1],
            "flush_cache": False,
        }
    return bodies, answers


def invitations(part: BroadcastPart, attempt: SyncAttempt, rendezvous: Rendezvous) -> Bodies:
    """Build init_weights_update_group bodies, for servers without the megavlm loaders to join a
    part's group.
    """
    return {
        url: {
            "master_address": rendezvous.host,
            "master_port": rendezvous.port,
            "world_size": part.size,
            "group_name": part.group,
            "backend": platform.backend(),
            "rank_offset": 1 + num_ranks(part.urls[:place], attempt),
        }
        for place, url in enumerate(part.urls)
    }


def whole_requests(part: BroadcastPart) -> Bodies:
    """Build update_weights_from_distributed bodies, for servers without the megavlm loaders to
    receive a part.
    """
    names = [name for name, _ in part.flat["whole"]]
    body = {
        "names": names,
        "dtypes": [part.flat["dtype"]] * len(names),
        "shapes": [shape for _, shape in part.flat["whole"]],
        "group_name": part.group,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }
    return dict.fromkeys(part.urls, body)


def num_ranks(urls: Sequence[str], attempt: SyncAttempt) -> int:
    """Return the total number of ranks of some servers."""
    return sum(attempt.layouts[url].tensor_parallel for url in urls)
