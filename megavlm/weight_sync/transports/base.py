"""How tensors reach servers: one interface, one file per way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import Engine


@dataclass(frozen=True)
class Load:
    """What is sent at once: whole tensors, contiguous or not, under their HF names, for the servers
    `urls`. changed: whether training can change them.
    """

    tensors: Sequence[tuple[str, Tensor]]
    urls: tuple[str, ...]
    changed: bool


class Transport(Protocol):
    """Made on every rank, connected to nothing. Rank 0 prepares a push and commits or aborts it;
    each rank that sends opens it and sends. All but `abort` and `close` raise WeightSyncError; a
    server that fails is lost to `servers`, and the others go on; TrainerFault is none of theirs. No
    load flushes a server's cache: that is done once, when all are there.

    by_stage: each pipeline stage's first rank sends what the stage holds; else rank 0 sends all.
    in_session: servers take it only between begin_weight_update and end_weight_update.
    together: the servers take each load together, so that one that is lost stops all, and senders
    take turns.
    """

    by_stage: bool
    in_session: bool
    together: bool

    def prepare(self) -> None:
        """On rank 0, before any rank opens."""

    def open(self, servers: Servers, engines: Mapping[str, Engine]) -> None:
        """Takes the servers of a push, and their layouts."""

    def send(self, load: Load) -> int:
        """Hands tensors over; bytes of tensors that left this process, for all servers together."""

    def commit(self, servers: Servers, refitted: Sequence[str]) -> None:
        """On rank 0, after every rank has sent all: returns when the servers have loaded it.
        `refitted`: those that got what training cannot change, too.
        """

    def abort(self, servers: Servers) -> None:
        """On rank 0: leaves the servers able to take the next push; their weights may be mixed
        until then.
        """

    def close(self) -> None:
        """Gives back what the transport holds."""
