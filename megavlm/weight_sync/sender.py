"""A sending rank's part of a push: what it has gathered goes out while it gathers more."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import httpx
import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.inference.errors import TrainerFault, WeightSyncError
from megavlm.weight_sync import checksums as verify
from megavlm.weight_sync.coordinator import Round, Sent
from megavlm.weight_sync.double_buffer import DoubleBuffer
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.transports.base import Load, Transport


@dataclass(frozen=True)
class Turn:
    """Senders that must not overlap send one after the other: rank `after` goes before this one,
    rank `before` after it. `group`: a gloo group that nothing else uses meanwhile.
    """

    after: int | None
    before: int | None
    group: dist.ProcessGroup | None

    def take(self) -> bool:
        """Waits for it; False when the sender before has failed."""
        if self.after is None:
            return True
        token = torch.empty(1)
        dist.recv(token, self.after, group=self.group)
        return bool(token.item())

    def give(self, *, ok: bool) -> None:
        if self.before is not None:
            dist.send(torch.tensor([float(ok)]), self.before, group=self.group)


class Sender:
    """A context, for one round. `put` blocks while two buckets are held. What fails ends the
    sending, and is in `sent`; what is put later is dropped, so that ranks that give wait for
    nobody.
    """

    def __init__(
        self,
        transport: Transport,
        round_: Round,
        turn: Turn,
        *,
        timeout: float,
        http: httpx.Client,
    ) -> None:
        self._transport, self._round, self._turn = transport, round_, turn
        self._servers = Servers(round_.targets, timeout=timeout, http=http)
        self._bytes = self._tensors = 0
        self._changed: verify.Expected = {}
        self._rest: verify.Expected = {}
        self._error: str | None = None
        self._is_own_fault = self._has_turn = False
        self._double_buffer: DoubleBuffer[tuple[Sequence[tuple[str, Tensor]], bool]] = DoubleBuffer(
            self._deliver
        )

    def put(self, tensors: Sequence[tuple[str, Tensor]], *, changed: bool) -> None:
        """HF names and tensors; `changed`: for all servers, else for the refitted ones."""
        self._double_buffer.put((tensors, changed))

    def sent(self) -> Sent:
        return Sent(
            self._bytes,
            self._tensors,
            self._changed,
            self._rest,
            dict(self._servers.lost),
            self._error,
            self._is_own_fault,
        )

    def __enter__(self) -> "Sender":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._double_buffer:
            if exc is None:
                self._double_buffer.wait()
                self._begin()  # with nothing to send, too: the next sender waits for this one
                self._turn.give(ok=self._error is None)

    def _begin(self) -> None:
        if self._has_turn:
            return
        self._has_turn = True
        if not self._turn.take():
            self._error = "a sender before this one failed"
            return
        try:
            self._transport.open(self._servers, self._round.engines)
        except WeightSyncError as error:
            self._error = str(error)

    def _deliver(self, bucket: tuple[Sequence[tuple[str, Tensor]], bool]) -> None:
        """On the outbox's thread."""
        self._begin()
        if self._error is not None:
            return
        tensors, changed = bucket
        round_ = self._round
        urls = round_.urls if changed else round_.refitted
        try:
            self._bytes += self._transport.send(Load(tensors, urls, changed))
        except WeightSyncError as error:
            self._error, self._is_own_fault = str(error), isinstance(error, TrainerFault)
            return
        self._tensors += len(tensors)
        devices = {
            round_.engines[target.url]: target.device
            for target in round_.targets
            if target.url in round_.compared and target.url in urls
        }
        verify.add(self._changed if changed else self._rest, verify.checksums(tensors, devices))
