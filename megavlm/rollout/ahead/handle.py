"""The trainer's side of the rollout producer: it starts the process, forwards the states of the
servers, allows prompts, and takes groups.
"""

import math
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

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.schema import Config
from megavlm.environments.curriculum import Curriculum
from megavlm.inference.connect import Connection
from megavlm.inference.errors import RolloutServerError
from megavlm.observability.phases import Phases
from megavlm.rollout.ahead.group_arrays import receive_groups, unpack_groups
from megavlm.rollout.ahead.mirror import ServerStates, apply_report
from megavlm.rollout.ahead.producer import ProducerSetup
from megavlm.rollout.groups import has_signal, until_signal
from megavlm.rollout.sampler import Refit
from megavlm.rollout.trajectory import Group
from megavlm.rollout.wave import Wave

END_SECONDS = 20.0  # that the producer has to end its processes


def start_process(descriptor: int) -> "subprocess.Popen[bytes]":
    """Start a producer that serves the socket `descriptor`."""
    return subprocess.Popen(
        [sys.executable, "-m", "megavlm.rollout.ahead.producer", str(descriptor)],
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


class AheadSource:
    """Implements WaveSource with groups that a producer makes while the trainer trains. The
    producer's errors are raised by the next call.
    """

    def __init__(
        self,
        config: Config,
        connection: Connection,
        curriculum: Curriculum,
        phases: Phases,
    ) -> None:
        """Start the process; it ends when this process does. It generates nothing until `take`
        allows prompts. phases: Clock for the phase `rollout`, the time spent waiting for the
        producer; it also gets the producer's signs of progress.
        """
        algorithm, rollout = config.algorithm, config.rollout
        assert isinstance(algorithm, PolicyOptimization)
        self._algorithm, self._steps_started = algorithm, rollout.steps_started
        self._pool, self._curriculum, self._phases = connection.server_pool, curriculum, phases
        self._version: int | None = None
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

    def take(self, count: int, version: int, refit: Refit | None) -> list[Group]:
        """Return the next groups, in the order in which their prompts were drawn or, with
        rollout.oversample, of the oldest weights first. Also raises RolloutServerError if the
        producer died.
        """
        self.measures = {}

        def sample(missing: int) -> list[Group]:
            self._allow(missing, version)
            return self._next_groups(missing, refit)[1]

        with self._phases("rollout"):
            return until_signal(count, self._algorithm.dynamic_sampling, sample)

    def waves(
        self, count: int, version: int, refit: Refit | None, least_tokens: int
    ) -> Iterator[Wave]:
        """Yield the groups that `take` returns and a step trains on in waves, as they are played.
        Only the last wave may have fewer than `least_tokens` tokens. Raises as `take` does.

        With dynamic sampling, groups without signal wait for the last wave, which takes as many as
        are needed.
        """
        self.measures = {}
        rounds, without_signal = self._algorithm.dynamic_sampling, list[Group]()
        free = list(range(count))  # places without a group
        for rounds_left in reversed(range(rounds + 1)):
            places, free = free, []
            self._allow(len(places), version)
            while places:
                with self._phases("rollout"):
                    indices, groups = self._next_groups(len(places), refit, least_tokens)
                wave = dict(zip((places[i] for i in indices), groups, strict=True))
                places = [place for place in places if place not in wave]
                if rounds:
                    lost = [place for place, group in wave.items() if not has_signal(group)]
                    without_signal += [wave.pop(place) for place in lost]
                    free = sorted([*free, *lost])
                is_last = not places and not (free and rounds_left)
                if is_last:
                    wave |= zip(free, without_signal, strict=False)
                if wave:
                    left_out = without_signal[len(free) :] if is_last else ()
                    yield Wave(list(wave.values()), list(wave), is_last, left_out)
            if not free:
                return

    def _allow(self, count: int, version: int) -> None:
        """Let the producer start `count` prompts, or those of a new version."""
        if version != self._version:
            # The first call allows all prompts that may be started, each new version one step more.
            steps = self._steps_started if self._version is None else 1
            count, self._version = math.ceil(steps * self._algorithm.prompts_per_step), version
            self._outgoing.put(None)
            self._outgoing.put(("advance", version, self._curriculum.stage(version)))
        self._outgoing.put(("allow", count))

    def _next_groups(
        self, count: int, refit: Refit | None, least_tokens: int | None = None
    ) -> tuple[list[int], list[Group]]:
        """Wait for the producer's next `count` groups or, with `least_tokens`, for enough of them.
        Returns their places among the `count`, and the groups.
        """
        assert refit is not None, "weights are pushed to the servers of a producer"
        self._outgoing.put(("take", count, least_tokens))
        while True:
            kind, *values = self._next()
            if kind == "groups":
                indices, counts, totals, packed = values
                # Each wave, and each round of dynamic sampling, has its own counts.
                added = {name: self.measures.get(name, 0.0) + n for name, n in counts.items()}
                self.measures |= added | totals
                return indices, unpack_groups(packed)
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
            self._outgoing.put(None)  # a request for a push, made by the next `take`

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
                if message[0] == "groups":
                    message = (*message, receive_groups(self._pipe))
            except (EOFError, OSError):
                self._incoming.put(("ended",))
                return
            self._incoming.put(message)
