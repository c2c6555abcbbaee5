"""Rank 0's store, over which the ranks of the trainer and of the servers talk about an attempt."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist


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

    attempt: Unique name of the attempt, and prefix of its keys. group: Beginning of the name of the
    process group with the servers. base: The last attempt, if all servers have its weights.
    """

    host: str
    port: int
    attempt: str
    group: str
    base: str | None

    @property
    def fault(self) -> str:
        return f"{self.attempt}/fault"

    def stream(self, index: int) -> str:
        """Return the prefix of a stream's keys."""
        return f"{self.attempt}/{index}"

    def changes(self, index: int, number: int) -> str:
        """Return the key of the parts of a bucket's changes."""
        return f"{self.stream(index)}/changes/{number}"

    def answer(self, server: int, rank: int) -> str:
        """Return the key of a server rank's answer."""
        return f"{self.attempt}/answers/{server}/{rank}"


class StoreClient:
    """This rank's connections to the store: one for each use, because waiting blocks a connection
    for all its users.
    """

    def __init__(self, timeout: float) -> None:
        """timeout: Seconds that a use may wait for a key."""
        self._limit = timedelta(seconds=timeout)
        self._stores: dict[str, dist.TCPStore] = {}

    def serve(self, urls: Sequence[str]) -> tuple[str, int]:
        """Serve the store, on rank 0, and return its address. urls: Servers that must reach it."""
        if not self._stores:
            self._stores["polls"] = dist.TCPStore(
                _own_address(urls), 0, is_master=True, timeout=self._limit, wait_for_workers=False
            )
        return self._stores["polls"].host, self._stores["polls"].port

    def connect(self, use: str, rendezvous: Rendezvous) -> dist.TCPStore:
        """Return the connection for a use. Raises RuntimeError if rank 0 cannot be reached."""
        if use not in self._stores:
            self._stores[use] = dist.TCPStore(
                rendezvous.host, rendezvous.port, is_master=False, timeout=self._limit
            )
        return self._stores[use]

    def drop(self, use: str) -> None:
        """Drop the connection for a use, in which a thread may still wait."""
        self._stores.pop(use, None)

    def check(self, rendezvous: Rendezvous) -> None:
        """Raise the Fault of another rank, if there is one."""
        store = self.connect("polls", rendezvous)
        if store.check([rendezvous.fault]):
            fault = json.loads(store.get(rendezvous.fault))
            raise Fault(fault["reason"], fault["lost"])

    def report(self, rendezvous: Rendezvous, reason: str, lost: Mapping[str, str]) -> None:
        """Tell all ranks about a failure, if this rank is connected and none was told before."""
        store = self._stores.get("polls")
        if store is not None and not store.check([rendezvous.fault]):
            store.set(rendezvous.fault, json.dumps({"reason": reason, "lost": lost}))

    def take_answer(self, rendezvous: Rendezvous, server: int, rank: int) -> Any:
        """Return the answer of a server's rank, None if there is none, and remove it."""
        store, key = self.connect("polls", rendezvous), rendezvous.answer(server, rank)
        if not store.check([key]):
            return None
        answer = json.loads(store.get(key))
        store.delete_key(key)
        return answer


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
