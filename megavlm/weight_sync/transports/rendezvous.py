"""Messages of a distributed weight sync, in a store that rank 0 serves. They are exchanged between
sending ranks, and with ranks of servers.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

POLL = 0.02  # seconds between reads of the store

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
