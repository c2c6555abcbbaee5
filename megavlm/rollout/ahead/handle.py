"""The trainer's side of the rollout producer: it starts the process, forwards the states of the
servers, begins steps, and takes groups.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from typing import Any

from megavlm.config.schema import Config
from megavlm.data.shared_pickle import SharedPickle
from megavlm.environments.curriculum import Curriculum
from megavlm.inference.connect import Connection
from megavlm.inference.errors import RolloutServerError
from megavlm.observability.phases import Phases
from megavlm.rollout.ahead.mirror import ServerStates, apply_report
from megavlm.rollout.ahead.producer import ProducerSetup
from megavlm.rollout.buffer import StreamBatch
from megavlm.rollout.sampler import Refit
from megavlm.rollout.trajectory import Group

END_SECONDS = 20.0  # that the producer has to end its processes


def start_process(descriptor: int) -> "subprocess.Popen[bytes]":
    """Start a producer that serves the socket `descriptor`."""
    return subprocess.Popen(
        [sys.executable, "-m", "megavlm.rollout.ahead.producer", str(descriptor)],
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


class AsyncRolloutSource:
    """Implements GroupSource with groups that a producer makes while the trainer trains. The
    producer's errors are raised by the next call.
    """

    def __init__(
        self,
        config: Config,
        connection: Connection,
        curriculum: Curriculum,
        phases: Phases,
    ) -> None:
        """Start the process; it ends when this process does. It generates nothing until a
        step begins. phases: Clock for the phase `rollout`, the time spent waiting for the
        producer; it also gets the producer's signs of progress.
        """
        self._pool, self._curriculum, self._phases = connection.server_pool, curriculum, phases
        self.measures: dict[str, float] = {}
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_process(theirs.fileno())
        self._pipe = Pipe(ours.detach())
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pipe.send(ProducerSetup(config, connection.client.limits, os.getpid()))
        # These threads only wait for the pipe; rollouts take no compute in this process.
        for work in (self._send_all, self._receive_all):
            threading.Thread(target=work, name="producer", daemon=True).start()
        self._stack = ExitStack()
        self._stack.enter_context(self._pool.in_use(lambda: self._outgoing.put(None)))

    def stream(
        self, version: int, refit: Refit | None, least_tokens: int | None = None
    ) -> Iterator[StreamBatch[Group]]:
        """Yield the next groups as GroupSource does. Also raises RolloutServerError if the producer
        died.
        """
        assert refit is not None, "weights are pushed to the servers of a producer"
        self._outgoing.put(None)
        self._outgoing.put(("begin", version, self._curriculum.stage(version)))
        is_last = False
        while not is_last:
            with self._phases("rollout"):
                self._outgoing.put(("take", least_tokens))
                places, is_last, self.measures, packed = self._next_batch(refit)
                groups = packed.unpack()
                del packed  # its file would stay in memory with it
            yield StreamBatch(groups[: len(places)], places, is_last, groups[len(places) :])

    def _next_batch(self, refit: Refit) -> tuple[Any, ...]:
        """Wait for the producer's next streamed batch; push the weights when it asks for them."""
        while True:
            kind, *values = self._next()
            if kind == "batch":
                return tuple(values)
            assert kind == "refit", kind
            if not self._pool.routable(None):
                refit()
            self._outgoing.put(None)

    def state_dict(self) -> dict[str, Any]:
        self._outgoing.put(("state",))
        while True:
            kind, *values = self._next()
            if kind == "state":
                state: dict[str, Any] = values[0]
                return state
            self._outgoing.put(None)  # a request for a push, made by the next step

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._outgoing.put(("load", dict(state)))

    def close(self) -> None:
        self._stack.close()
        self._outgoing.put("end")
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _next(self) -> tuple[Any, ...]:
        """Return the producer's next message. Raises its errors."""
        while True:
            self._pool.routable(None)  # raises RolloutServerError if too few are left
            try:
                message: tuple[Any, ...] = self._incoming.get(timeout=1.0)
            except queue.Empty:
                continue
            if message[0] == "error":
                raise message[1]
            if message[0] == "ended":
                code = self._process.wait()
                how = f"exit code {code}: its own message is above"
                if code < 0:  # killed by a signal, so it printed nothing
                    how = signal.Signals(-code).name
                raise RolloutServerError(
                    f"the producer of rollouts ended with {how}; the run can resume from its last "
                    "checkpoint"
                )
            return message

    def _send_all(self) -> None:
        """Send queued messages; None stands for the current states of the servers."""
        while (message := self._outgoing.get()) != "end":
            if message is None:
                message = "servers", ServerStates.of(self._pool)
            try:
                self._pipe.send(message)
            except OSError:
                return  # the producer has ended; the other thread reports it
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_WR)  # on the end of the stream the producer ends

    def _receive_all(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
                if message[0] == "beat":
                    self._phases.beat()
                    continue
                if message[0] == "report":
                    apply_report(self._pool, message[1])
                    continue
                if message[0] == "batch":
                    message = (*message, SharedPickle.receive(self._pipe))
            except (EOFError, OSError):
                self._incoming.put(("ended",))
                return
            self._incoming.put(message)
