"""The trainer's side of the rollout producer: it starts the process, forwards the states of the
servers, allows prompts, and takes groups.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.curriculum import CurriculumStage
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.rollout.ahead.group_arrays import receive_groups, unpack_groups
from megavlm.rollout.ahead.mirror import ServerStates, apply_report
from megavlm.rollout.ahead.producer import ProducerSetup
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


class RolloutProducer:
    """Handle of the producer for the driver. The producer's errors are raised by the next call.

    measures: Metrics of the groups taken last, under their names in observability/metrics.py.
    """

    def __init__(
        self,
        setup: ProducerSetup,
        server_pool: ServerPool,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the process; it ends when this process does. It generates nothing until `take`
        allows prompts. beat: Callback for each response.
        """
        algorithm, rollout = setup.config.algorithm, setup.config.rollout
        assert isinstance(algorithm, PolicyOptimization)
        self._step_size, self._staleness = algorithm.prompts_per_step, rollout.max_staleness
        self._pool, self._beat = server_pool, beat
        self._version: int | None = None
        self.measures: dict[str, float] = {}
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_process(theirs.fileno())
        self._connection = Connection(ours.detach())
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._connection.send(replace(setup, parent=os.getpid()))
        # These threads only wait for the pipe; rollouts take no compute in this process.
        for work in (self._send_all, self._receive_all):
            threading.Thread(target=work, name="producer", daemon=True).start()
        self._stack = ExitStack()
        self._stack.enter_context(server_pool.in_use(lambda: self._outgoing.put(None)))

    def take(
        self,
        count: int,
        version: int,
        stage: CurriculumStage | None,
        refit: Callable[[], None],
    ) -> list[Group]:
        """Return the next `count` groups, in the order in which their prompts were drawn.

        Args:
            version: Version of the current weights. With a new version, prompts for one more step
                may start; with the same version again, only as many as are taken.
            stage: Curriculum stage of prompts that start.
            refit: Function that pushes the weights if no server has usable ones.

        Raises the producer's error, and RolloutServerError if the producer died or too few servers
        are left.
        """
        allowed = count
        if version != self._version:
            # The first call allows all prompts that may run ahead, each new version one step more.
            steps = self._staleness + 1 if self._version is None else 1
            allowed, self._version = steps * self._step_size, version
            self._outgoing.put(None)
            self._outgoing.put(("advance", version, stage))
        self._outgoing.put(("allow", allowed))
        self._outgoing.put(("take", count))
        while True:
            kind, *values = self._next()
            if kind == "groups":
                self.measures, packed = values
                return unpack_groups(packed)
            assert kind == "refit", kind
            if not self._pool.routable(None):
                refit()
            self._outgoing.put(None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of prompts and groups for a checkpoint. Groups that were taken count as
        trained on.
        """
        self._outgoing.put(("state",))
        while True:
            kind, *values = self._next()
            if kind == "state":
                state: dict[str, Any] = values[0]
                return state
            self._outgoing.put(None)  # a request for a push, made by the next `take`

    def close(self) -> None:
        """End the producer and all its processes."""
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
                self._connection.send(message)
            except OSError:
                return  # the producer has ended; the other thread reports it
        with socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_WR)  # on the end of the stream the producer ends

    def _receive_all(self) -> None:
        while True:
            try:
                message = self._connection.recv()
                if message[0] == "beat":
                    self._beat()
                    continue
                if message[0] == "report":
                    apply_report(self._pool, message[1])
                    continue
                if message[0] == "groups":
                    message = (*message, receive_groups(self._connection))
            except (EOFError, OSError):
                self._incoming.put(("ended",))
                return
            self._incoming.put(message)
