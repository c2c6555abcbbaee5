"""Servers on the other nodes of a run whose trainer and servers share GPUs.

Rank 0 has the pool of all servers, and decides when one starts, stops or is given up. The processes
of a server belong to the first rank of its node. A thread of that rank receives rank 0's orders and
answers with the states of the node's servers, over a gloo group of these ranks. An order is one of
three words and the number of a server that the rank itself has set up, so that nothing else can be
started by it.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_process import with_log
from megavlm.parallel.collectives import receive, send

Order = Literal["launch", "stop", "abort"]
PERIOD = 0.2  # seconds between two exchanges of orders and states


@dataclass(frozen=True)
class ServerDescription:
    """A server as its node's first rank describes it to rank 0. too_late: The error if it does not
    become healthy.
    """

    node: int
    url: str
    log_path: Path
    tensor_parallel: int
    device: str
    too_late: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)

    @classmethod
    def of(cls, server: ManagedServer, node: int) -> "ServerDescription":
        return cls(
            node,
            server.url,
            server.log_path,
            server.tensor_parallel,
            server.device,
            server.too_late,
            server.api_key,
            server.admin_key,
        )


@dataclass(frozen=True)
class ProcessState:
    """State of a server's processes; see the properties of ServerProcess with these names. running:
    True from the order to launch until the processes have ended.
    """

    running: bool = False
    death: str | None = None
    listens: bool = False
    cpu_seconds: float | None = None


class NodeServers:
    """The servers of this node, on its first rank. Within the context they obey rank 0."""

    def __init__(self, servers: Sequence[ManagedServer], group: dist.ProcessGroup) -> None:
        self._servers, self._group = servers, group
        self._refused: dict[int, str] = {}  # why a server could not be launched
        self._listening: set[int] = set()
        self._stops: dict[int, threading.Thread] = {}
        self._lock, self._closing = threading.Lock(), False
        # To the kernel, this thread is the servers' parent: it lives as long as they do.
        self._thread = threading.Thread(target=self._serve, name="node-servers", daemon=True)

    def __enter__(self) -> "NodeServers":
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._thread.join()  # rank 0 ends it, when it needs no servers any more
        with self._lock:
            self._closing = True
        stop_all(self._servers)

    def _serve(self) -> None:
        with suppress(RuntimeError):  # a lost connection: rank 0 is gone
            while (orders := json.loads(receive(0, self._group))) is not None:
                with self._lock:
                    if self._closing:
                        return
                    for index, order in orders:
                        self._obey(index, order)
                    states = [asdict(self._state(index)) for index in range(len(self._servers))]
                send(json.dumps(states).encode(), 0, self._group)
        with self._lock:
            stop_all(self._servers)

    def _obey(self, index: int, order: Order) -> None:
        server = self._servers[index]
        if order == "abort":
            server.abort()
            return
        self._refused.pop(index, None)
        self._listening.discard(index)
        if order == "launch":
            try:
                server.launch()
            except (RolloutServerError, OSError) as error:
                self._refused[index] = str(error)
        else:  # it takes seconds, in which other servers need not wait
            self._stops[index] = threading.Thread(target=server.stop, name="stop-server")
            self._stops[index].start()

    def _state(self, index: int) -> ProcessState:
        server, stop = self._servers[index], self._stops.get(index)
        if stop is not None and stop.is_alive():
            return ProcessState(running=True)
        if index in self._refused:
            return ProcessState(running=True, death=self._refused[index])
        if not server.running:
            return ProcessState()
        server.rotate_log()
        if index not in self._listening and server.listens:
            self._listening.add(index)
        seconds = server.cpu_seconds if server.device == "cpu" else None
        return ProcessState(True, server.death(), index in self._listening, seconds)


class RemoteServer:
    """A server on another node, for rank 0's pool: it has the interface of ManagedServer."""

    def __init__(self, description: ServerDescription, nodes: "OtherNodes", rank: int, index: int):
        self.node, self.url = description.node, description.url
        self.api_key, self.admin_key = description.api_key, description.admin_key
        self.tensor_parallel, self.device = description.tensor_parallel, description.device
        self.log_path, self.too_late = description.log_path, description.too_late
        self.rank, self.index, self.state = rank, index, ProcessState()
        self._nodes = nodes

    @property
    def running(self) -> bool:
        return self.state.running

    @property
    def listens(self) -> bool:
        return self.state.listens

    @property
    def cpu_seconds(self) -> float | None:
        return self.state.cpu_seconds

    def death(self) -> str | None:
        """Return why the server died, or None while it runs. Raises RolloutServerError if its node
        is lost.
        """
        if self._nodes.lost is not None:
            raise RolloutServerError(self._nodes.lost)
        return self.state.death

    def launch(self) -> None:
        self._nodes.order(self, "launch", ProcessState(running=True))

    def abort(self) -> None:
        self._nodes.order(self, "abort", self.state)

    def stop(self) -> None:
        """Block until the server's processes have ended."""
        if self.running:
            self._nodes.order(self, "stop", ProcessState(running=True))
            self._nodes.wait_until_stopped(self)

    def rotate_log(self) -> None:
        """Do nothing, because its node rotates the log."""

    def with_log(self, message: str) -> str:
        return with_log(message, self.log_path)


class OtherNodes:
    """The other nodes of the run, on rank 0. Within the context a thread sends orders and receives
    states.

    descriptions: Each node's servers, by the node's first rank. lost: Why no orders can be sent any
    more.
    """

    def __init__(
        self, descriptions: dict[int, Sequence[ServerDescription]], group: dist.ProcessGroup
    ) -> None:
        self.lost: str | None = None
        self._group, self._changed = group, threading.Condition()
        self._orders: defaultdict[int, list[tuple[int, Order]]] = defaultdict(list)
        self._servers = {
            rank: [RemoteServer(server, self, rank, index) for index, server in enumerate(servers)]
            for rank, servers in descriptions.items()
        }
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._exchange_all, name="other-nodes", daemon=True)

    @property
    def servers(self) -> list[RemoteServer]:
        return [server for servers in self._servers.values() for server in servers]

    def __enter__(self) -> "OtherNodes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def order(self, server: RemoteServer, order: Order, state: ProcessState) -> None:
        """Send an order with the next exchange. state: The server's state until the answer."""
        with self._changed:
            server.state = state
            self._orders[server.rank].append((server.index, order))

    def wait_until_stopped(self, server: RemoteServer) -> None:
        with self._changed:
            while server.running and self.lost is None:
                self._changed.wait()

    def _exchange_all(self) -> None:
        rank = 0
        try:
            while not self._closing.is_set():
                with self._changed:
                    orders, self._orders = self._orders, defaultdict(list)
                for rank in self._servers:
                    send(json.dumps(orders[rank]).encode(), rank, self._group)
                for rank in self._servers:
                    self._apply(rank, json.loads(receive(rank, self._group)))
                time.sleep(PERIOD)
            for rank in self._servers:
                send(b"null", rank, self._group)
        except RuntimeError:  # torch.distributed raises it for a lost connection
            with self._changed:
                node = self._servers[rank][0].node
                self.lost = (
                    f"rank {rank}, which runs the rollout servers of node {node}, is gone: start "
                    "the run again, it goes on from its last checkpoint"
                )
                self._changed.notify_all()

    def _apply(self, rank: int, states: list[dict[str, object]]) -> None:
        with self._changed:
            later = {index for index, _ in self._orders[rank]}
            for server, state in zip(self._servers[rank], states, strict=True):
                if server.index not in later:  # else the state is older than its order
                    server.state = ProcessState(**state)  # type: ignore[arg-type]
            self._changed.notify_all()


def stop_all(servers: Sequence[ManagedServer]) -> None:
    """Stop servers at the same time."""
    with ExitStack() as stack:
        for server in servers:
            thread = threading.Thread(target=server.stop, name="stop-server")
            thread.start()
            stack.callback(thread.join)
