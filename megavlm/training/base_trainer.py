"""The loop around training steps: evaluation, checkpoints, records, and how a run ends."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megavlm.checkpointing import Saving
from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_pool.state import State
from megavlm.observability.samples import SampledGroup
from megavlm.parallel import platform
from megavlm.parallel.collectives import broadcast_object
from megavlm.training.colocate import Phase, Sharing
from megavlm.training.driver import Driver
from megavlm.training.guards import StopRequest
from megavlm.training.offload import Part, trainer_parts
from megavlm.training.train_state import TrainState
from megavlm.weight_sync.sync import SyncReport, WeightSync, measures

T = TypeVar("T")


class BaseTrainer:
    """A trainer is a Loop with a `train_step`, which makes one step and counts it in
    `session.step`.
    """

    def __init__(
        self, train_state: TrainState, driver: Driver | None, sync: WeightSync | None
    ) -> None:
        """`driver`: on rank 0; `sync`: where the run generates, with frozen tensors sent once at
        its start.
        """
        self.train_state, self.driver, self.sync = train_state, driver, sync
        self.sharing: Sharing | None = None
        self.pushes: list[SyncReport] = []  # since the last record
        if sync is not None and train_state.config.rollout.colocate:
            memory = None if driver is None else driver.server_memory
            self.sharing = Sharing(self.parts(), memory, train_state.mesh)
        state = self.resume()
        if driver is not None:
            driver.start(train_state.step, state)
        if sync is not None:
            with train_state.phases("sync"):
                self.push()
        self._published = train_state.step

    def resume(self) -> dict[str, Any] | None:
        """What the driver goes on from; None at a run's start. Collective."""
        return self.train_state.resume()

    def parts(self) -> dict[str, Part]:
        """Of this rank's memory, what leaves a GPU while servers work on it."""
        return trainer_parts(self.train_state.updater)

    @property
    def companion(self) -> Callable[[bool], Saving] | None:
        """Begins what is saved beside the policy, see Saver.save."""
        return None

    def train_step(self) -> None:
        raise AssertionError("a trainer defines its step")

    def run(self) -> bool:
        """Trains up to the configured step. False if the run was asked to stop before; both leave a
        checkpoint. One that is being written when training fails is finished, too.
        """
        with StopRequest() as stop, self.train_state.saver:
            return self._run(stop)

    def _run(self, stop: StopRequest) -> bool:
        train_state, evaluation = self.train_state, self.train_state.config.evaluation
        last, save_every = train_state.config.algorithm.steps, train_state.config.checkpoint.every
        saved = train_state.step
        if evaluation.before and train_state.step == 0:
            self.evaluate()
        while train_state.step < last:
            train_state.start_step_clock()
            self.train_step()
            train_state.saver.poll()
            step = train_state.step
            if (evaluation.every and step % evaluation.every == 0) or (
                step == last and evaluation.after
            ):
                self.evaluate()
            stopping = stop.agreed()
            if stopping or step == last or (save_every and step % save_every == 0):
                self.save()
                saved = step
            if stopping and step < last:
                return False
        if saved == 0:
            self.save()
        return True

    def publish(self) -> None:
        """The rollout servers get the present weights. Collective."""
        if self._published != self.train_state.step:
            self.push()
            self._published = self.train_state.step

    def push(self) -> None:
        """Collective. Servers that have started since get everything. Where all die in the push, or
        fail it, it is made again for those that come back or still answer, with everything; the
        fleet gives up servers that fail time and again, and then the run.
        """
        assert self.sync is not None, "this run has no rollout servers"
        server_pool = None if self.driver is None else self.driver.server_pool
        while True:
            setbacks = self.wait_for_servers()
            try:
                self.pushes.append(self.sync.update_weights(self.train_state.step))
                return
            except WeightSyncError:
                again = None if server_pool is None else server_pool.failed_since(setbacks)
                if not broadcast_object(again, self.train_state.mesh):
                    raise  # it is no server's fault

    def wait_for_servers(self) -> int:
        """Until weights can be pushed; the servers' setbacks so far, on the driver. Collective."""
        server_pool = None if self.driver is None else self.driver.server_pool
        if self.sharing is not None:
            if server_pool is not None:
                server_pool.wait_while(State.SUSPECT)
            nobody = None if server_pool is None else not server_pool.answering()
            if broadcast_object(nobody, self.train_state.mesh):
                self.share("generate")  # a server that starts takes all its memory
        setbacks = 0 if server_pool is None else server_pool.wait_for_targets()
        self.share("push")
        return setbacks

    def run_on_driver(self, work: Callable[[], T]) -> T | None:
        """What `work` returns on the driver, which alone does it; the other ranks are there for the
        pushes that it may ask for by `refit`. Collective.
        """
        mesh, result = self.train_state.mesh, None
        self.share("generate")
        if self.driver is not None:
            result = work()
            broadcast_object(False, mesh)
        else:
            while broadcast_object(None, mesh):
                self.push()
                self.share("generate")
        self.share("train")
        return result

    def refit(self) -> None:
        """Called within `stand_by` where servers need the present weights: they have started anew,
        say.
        """
        broadcast_object(True, self.train_state.mesh)
        self.push()
        self.share("generate")

    def share(self, phase: Phase) -> None:
        """Where trainer and servers share GPUs, the memory is that of `phase`. Collective."""
        if self.sharing is not None:
            self.sharing.move(phase)

    def evaluate(self) -> None:
        self.publish()
        self.run_on_driver(self.evaluate_served)

    def evaluate_served(self) -> None:
        assert self.driver is not None
        self.driver.evaluate(self.train_state.step, self.refit)

    def save(self) -> None:
        self.share("train")
        driver = self.driver
        state = None if driver is None else driver.state_dict()
        scores = {} if driver is None else driver.best_metric.take()
        self.train_state.save(state, scores, self.companion)

    def record(
        self, metrics: dict[str, float], *, num_tokens: int, samples: Sequence[SampledGroup] = ()
    ) -> None:
        """The step just made, on the driver."""
        seconds = self.train_state.phases.take()
        pushes, self.pushes = self.pushes, []
        if self.driver is None:
            return
        metrics |= {
            "tokens_per_second": num_tokens / seconds["seconds/total"],
            "memory_gib": platform.peak_memory_bytes() / 2**30,
        }
        self.driver.record(self.train_state.step, metrics | measures(pushes) | seconds, samples)
