"""The loop around training steps: evaluation, checkpoints, records, and how a run ends."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megavlm.checkpointing.save import PendingSave
from megavlm.config.algorithm import PolicyOptimization
from megavlm.inference.server_pool.memory import keeps_weights
from megavlm.parallel import platform
from megavlm.parallel.offload import Offloadable
from megavlm.training.colocate import SharedMemory, trainer_memory
from megavlm.training.driver import Driver
from megavlm.training.guards import StopRequest, TimeLimit
from megavlm.training.profiler import StepProfiler
from megavlm.training.step.rank_batch import RankBatch, share_batch
from megavlm.training.step.rank_images import ImageReader
from megavlm.training.step.step_plan import StepPlan
from megavlm.training.step.vision_features import VisionFeatures, is_trained
from megavlm.training.train_state import TrainState
from megavlm.training.weight_push import WeightPusher
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.update import sync_metrics


class BaseTrainer:
    """A trainer defines `train_step`, which makes one step and counts it in `train_state.step`."""

    weights: WeightPusher  # after setup

    def __init__(
        self, train_state: TrainState, driver: Driver | None, sync: WeightSync | None
    ) -> None:
        """Store the trainer's parts. driver: The driver, on rank 0 only. sync: The weight updates
        to rollout servers; None in a run that generates nothing.
        """
        self.train_state, self.driver, self.sync = train_state, driver, sync
        # Tokens of a step times forward passes of the language model, by phase; updates are not
        # counted.
        self.passed_tokens: defaultdict[str, float] = defaultdict(float)
        opened = () if driver is None else (driver.sampler.processor, driver.sampler.rows)
        self._image_reader = ImageReader(train_state.config, *opened)

    def setup(self) -> None:
        """Resume, open the records, and push the weights to the servers. Collective."""
        state, driver, memory = self.train_state, self.driver, None
        driver_state = self.resume()
        if state.step:
            state.progress.line(f"resumed from step {state.step} of {state.config.algorithm.steps}")
        connection = None if driver is None else driver.connection
        if connection is not None and connection.server_pool.is_starting:
            state.progress.begin("waiting for the rollout servers")
            with state.phases("start of servers"):
                connection.server_pool.wait_for_starts()
        if driver is not None:
            driver.start(state.step, driver_state)
        if self.sync is not None and state.config.rollout.colocate:
            servers = None if connection is None else connection.memory
            memory = SharedMemory(
                self.offloadable(),
                servers,
                state.mesh,
                keeps_weights=keeps_weights(state.config.rollout),
            )
        server_pool = None if connection is None else connection.server_pool
        self.weights = WeightPusher(state, self.sync, server_pool, memory)
        if self.sync is not None:
            state.progress.begin("sending the weights to the servers")
            with state.phases("sync"):
                self.weights.push()

    def resume(self) -> Mapping[str, Any] | None:
        """Load the checkpoint to resume from. Returns the driver's state in it, or None if the run
        starts anew. Collective.
        """
        return self.train_state.resume()

    def offloadable(self) -> dict[str, Offloadable]:
        """Return this rank's tensors that are offloaded from a shared GPU while the servers use
        it.
        """
        return trainer_memory(self.train_state.updater)

    @property
    def companion(self) -> Callable[[bool], PendingSave] | None:
        """Function that begins a second checkpoint together with the policy's; see Saver.save."""
        return None

    @property
    def update_passes(self) -> float:
        """FLOPs of the step's updates, as a multiple of one forward pass. A backward pass costs two
        forward passes, or one if only LoRA adapters have gradients.
        """
        config = self.train_state.config
        epochs = config.algorithm.epochs if isinstance(config.algorithm, PolicyOptimization) else 1
        return (2.0 if config.lora.rank else 3.0) * epochs

    def train_step(self) -> None:
        raise AssertionError("a trainer defines its step")

    @property
    def tower_trained(self) -> bool:
        """True if updates change image features. Valid on the first pipeline stage only, where the
        driver and the vision tower are.
        """
        return is_trained(self.train_state.model[0].visual)

    def share(self, plan: StepPlan | None) -> RankBatch:
        """Send each rank its share of the driver's plan, and return this rank's. Collective."""
        return share_batch(plan, self.train_state.mesh, self._image_reader, platform.device())

    def encode(self, batch: RankBatch) -> VisionFeatures:
        """Return the features of a batch's images. Collective."""
        device_bytes = self.train_state.config.model.features_mb * 2**20
        return VisionFeatures(self.train_state.updater.chunks, batch.images, device_bytes)

    def run(self, limit: TimeLimit) -> bool:
        """Train up to the configured step. Returns False if the run stopped earlier because of a
        stop request or because `limit` was near.

        A run that stops early saves a checkpoint, too. If training fails while a checkpoint is
        being written, the checkpoint is still completed.
        """
        state, config = self.train_state, self.train_state.config
        last, resumed = config.algorithm.steps, state.step or None
        connection = None if self.driver is None else self.driver.connection
        profiled = StepProfiler(state, None if connection is None else connection.server_pool)
        with StopRequest(limit) as stop, state.saver:
            while True:
                is_stopping = stop.agreed()
                if not is_stopping and self.evaluation_is_due():
                    self.evaluate(stop)
                    is_stopping = stop.agreed()
                is_last = state.step == last
                is_due = is_stopping or is_last or state.is_due(config.checkpoint.every)
                # The step that the run resumed from already has a checkpoint; step 0 needs none.
                if is_due and state.step != resumed and (state.step or is_last):
                    self.save()
                if is_stopping or is_last:
                    return not is_stopping
                state.start_step_clock()
                state.progress.count(state.step, last)
                with profiled(state.step + 1):
                    self.train_step()
                state.saver.poll()

    def evaluation_is_due(self) -> bool:
        """Return True if the recipe asks for an evaluation at the current step and none was made
        yet, by this process or before a restart.
        """
        state, settings = self.train_state, self.train_state.config.evaluation
        if state.evaluated_step == state.step:
            return False
        if state.step == 0:
            return settings.before
        is_last = state.step == state.config.algorithm.steps
        return state.is_due(settings.every) or (is_last and settings.after)

    def evaluate(self, stop: StopRequest) -> None:
        """Evaluate the current weights. A stop request interrupts the evaluation; a resumed run
        repeats it.
        """
        state = self.train_state
        state.updater.finish()
        state.progress.begin(f"evaluating after {state.step} steps")
        self.weights.push_if_changed()

        def evaluate_on_driver() -> None:
            assert self.driver is not None
            self.driver.evaluate(state.step, self.weights.refit)

        with state.phases("evaluation"):
            is_complete = self.weights.run_on_driver(lambda: stop.complete(evaluate_on_driver))
        if is_complete:  # set on the driver, whose value the checkpoint saves
            state.evaluated_step = state.step

    def save(self) -> None:
        self.train_state.updater.finish()
        self.weights.switch_memory("train")
        driver = self.driver
        state = None if driver is None else driver.state_dict()
        scores = {} if driver is None else driver.recorder.best_metric.take()
        self.train_state.save(state, scores, self.companion)

    def record(
        self,
        metrics: dict[str, float],
        *,
        num_tokens: int,
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Record the step that just finished. The driver writes the records; other ranks only reset
        their clocks.
        """
        seconds, pushes = self.train_state.phases.take(), self.weights.take_reports()
        if self.driver is None:
            return
        passes = {phase: tokens / num_tokens for phase, tokens in self.passed_tokens.items()}
        passes |= {"update": self.update_passes}
        self.passed_tokens.clear()
        metrics |= self.driver.planner.utilization(passes, seconds)
        metrics |= {
            "tokens_per_second": num_tokens / seconds["seconds/total"],
            "memory_gib": platform.peak_memory_bytes() / 2**30,
        }
        if "seconds/rollout" in seconds:
            metrics["trainer_idle_share"] = seconds["seconds/rollout"] / seconds["seconds/total"]
        self.driver.record(self.train_state.step, metrics | sync_metrics(pushes) | seconds, samples)
