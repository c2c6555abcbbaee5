"""Weight pushes of a run: retries when servers fail, pushes during a rollout, and the memory of
GPUs that are shared with the servers.
"""

from collections.abc import Callable
from typing import TypeVar

from megavlm.inference.errors import ServersFailed
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import State
from megavlm.parallel.collectives import broadcast_object
from megavlm.training.colocate import MemoryPhase, SharedMemory
from megavlm.training.train_state import TrainState
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.update import SyncReport

T = TypeVar("T")


class WeightPusher:
    """Pushes the weights of a training state to the rollout servers.

    sync: The weight updates; None in a run without servers. server_pool: The servers, on the
    driver; None on other ranks. memory: The memory of shared GPUs; None if trainer and servers have
    separate GPUs. Every method is collective.
    """

    def __init__(
        self,
        state: TrainState,
        sync: WeightSync | None,
        server_pool: ServerPool | None,
        memory: SharedMemory | None,
    ) -> None:
        self._state, self._sync, self._server_pool, self.memory = state, sync, server_pool, memory
        self._reports: list[SyncReport] = []

    def push(self) -> None:
        """Push the weights of the current step. A server that started since the last push gets all
        tensors, including frozen ones.

        If servers fail or die during the push, push again to the others or, if there are none, to
        the servers that recover. The server pool gives up servers that keep failing, and raises
        RolloutServerError when too few are left. Raises WeightSyncError if no server is at fault.
        """
        assert self._sync is not None, "this run has no rollout servers"
        failed: set[str] = set()  # servers to leave out, because they failed in this push
        while True:
            if not failed:
                self._wait_for_servers()
            try:
                report = self._sync.update_weights(self._state.step, without=failed)
            except ServersFailed as error:
                # Leave out all servers that failed in this push, if others are left. If none is,
                # forget them: the next attempt waits for the servers that recover.
                failed = (failed | error.urls) if error.left else set()
            else:
                self._reports.append(report)
                return

    def push_if_changed(self) -> None:
        """Push unless the servers have the weights of the current step."""
        assert self._sync is not None, "this run has no rollout servers"
        if self._sync.version != self._state.step:
            self.push()

    def run_on_driver(self, work: Callable[[], T]) -> T | None:
        """Run `work` on the driver only. Returns its result on the driver and None on other ranks.
        Meanwhile the other ranks take part in the pushes that `work` requests by `refit`.
        """
        mesh, result = self._state.mesh, None
        if self.memory is not None and self.memory.needs_push:
            self.push()
        self.switch_memory("generate")
        if mesh.is_driver:
            result = work()
            # False ends the loop of the other ranks; `refit` broadcasts True for each push.
            broadcast_object(False, mesh)
        else:
            while broadcast_object(None, mesh):
                self.push()
                self.switch_memory("generate")
        self.switch_memory("train")
        return result

    def refit(self) -> None:
        """Push the weights again, for servers that restarted. Only the `work` of `run_on_driver`
        calls it, on the driver.
        """
        broadcast_object(True, self._state.mesh)
        self.push()
        self.switch_memory("generate")

    def switch_memory(self, phase: MemoryPhase) -> None:
        """Load the memory of `phase` on shared GPUs; do nothing if GPUs are not shared."""
        if self.memory is not None:
            with self._state.phases("switch"):
                self.memory.switch(phase)

    def take_reports(self) -> list[SyncReport]:
        """Return the reports of all pushes since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def _wait_for_servers(self) -> None:
        """Block until a server can take weights."""
        pool, mesh = self._server_pool, self._state.mesh
        if self.memory is not None:
            if pool is not None:
                pool.wait_while(State.SUSPECT)
            no_server = None if pool is None else not pool.answering()
            if broadcast_object(no_server, mesh):
                self.switch_memory("generate")  # a server that starts takes all its memory
        if pool is not None:
            pool.wait_for_receivers()
        self.switch_memory("push")
