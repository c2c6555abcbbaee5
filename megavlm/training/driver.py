"""The driver, rank 0's part of a run: data, the plan of each step, evaluation and records."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megavlm.config.algorithm import SFT, PolicyOptimization
from megavlm.config.schema import Config
from megavlm.data.loader import PromptStream, held_for
from megavlm.data.packing import Tree
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Rows
from megavlm.environments.curriculum import Curriculum
from megavlm.environments.registry import find_environment
from megavlm.families import family, family_of
from megavlm.inference.client import RolloutClient
from megavlm.inference.connect import Connection
from megavlm.models.cost import ModelCost
from megavlm.observability.console import legend, step_line
from megavlm.observability.metrics import MetricsWriter, evaluation_scalars
from megavlm.observability.progress import Progress
from megavlm.observability.records import append_record, keep_records
from megavlm.observability.samples import SampleWriter
from megavlm.observability.trackers import Trackers
from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh
from megavlm.rollout.ahead.handle import RolloutProducer
from megavlm.rollout.ahead.producer import ProducerSetup
from megavlm.rollout.episodes import EpisodeRunner
from megavlm.rollout.partial_rollouts import PartialRolloutBuffer, TimedOutGroups
from megavlm.rollout.recorded import ROLLOUTS_FOLDER, RecordedRollouts
from megavlm.rollout.rewards import make_reward_manager
from megavlm.rollout.trajectory import Group
from megavlm.training.best_metric import BestMetricTracker
from megavlm.training.evaluation import EvaluationSet, evaluate, sampling
from megavlm.training.step.image_plan import plan_images
from megavlm.training.step.rank_images import image_places
from megavlm.training.step.step_plan import (
    PackShape,
    StepPlan,
    plan_step,
    schedule_of,
    shown_images,
)
from megavlm.training.utilization import StepFlops, utilization

SKIPPED_FILE = "skipped_updates.jsonl"  # in the run directory: rows of steps that skipped an update
LINE_EVERY = 1.0  # minimum seconds between printed steps; the records have every step


class Driver:
    episode_runner: EpisodeRunner  # in a run with rollout servers
    producer: RolloutProducer | None = None  # with rollout.max_staleness

    def __init__(
        self,
        config: Config,
        hf_config: Any,
        mesh: Mesh,
        connection: Connection | None,
        progress: Progress,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        """Load the data and start the rewards. connection: The rollout servers; None in a run that
        generates nothing. beat: Callback for each response that the rollout producer receives.
        """
        self.config, self.mesh, self.connection = config, mesh, connection
        self._progress, self._beat = progress, beat
        self._planned: list[str] = []  # sources of the rows of the step planned last
        self._last_line: float | None = None  # when a step was last printed
        parts = family(hf_config.model_type)
        self._cost = ModelCost.of(parts.mapping(hf_config), parts.architecture(hf_config))
        text = hf_config.get_text_config()
        self._output_cost = 2.0 * text.vocab_size * text.hidden_size  # per target token
        data, algorithm = config.data, config.algorithm
        self.processor = Processor(config.model.folder, data, family_of(config.model.folder))
        self.rows, self.test_rows = Rows(data.train_files, data), Rows(data.test_files, data)
        # Prompts are read in batches of one step, so that an image is processed once per step.
        is_sft = isinstance(algorithm, SFT)
        size = algorithm.batch_size if isinstance(algorithm, SFT) else algorithm.prompts_per_step
        self.stream = PromptStream(
            self.rows,
            self.processor.supervised_prompt if is_sft else self.processor.prompt,
            data,
            seed=config.run.seed,
            batch_size=size,
            held="nothing" if is_sft else held_for(config.rollout),
        )
        self.partial_rollouts = PartialRolloutBuffer(TimedOutGroups(config.rollout.timed_out, size))
        self.best_metric = BestMetricTracker(config.checkpoint.best_metric)
        self.curriculum = Curriculum(config.curriculum)
        if connection is not None:
            self.episode_runner = EpisodeRunner(
                config, self.processor, make_reward_manager(config), connection.client.runner
            )

    def start(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Open the records at `step`, and restore `state`, the `state_dict` of a checkpoint."""
        config, algorithm = self.config, self.config.algorithm
        has_producer = config.rollout.max_staleness > 0 and config.rollout.replay is None
        if has_producer and isinstance(algorithm, PolicyOptimization):
            assert self.connection is not None
            how, limits = sampling(config, self.processor), self.connection.client.limits
            setup = ProducerSetup(config, how, limits, state, step)
            self.producer = RolloutProducer(setup, self.connection.server_pool, self._beat)
        if state is not None:
            self.stream.load_state_dict(state)
            self.curriculum.load_state_dict(state["curriculum"])
        if state is not None and self.producer is None:
            backlog = state["backlog"]
            if not find_environment(config.environment.name).starts_from_row:
                # A producer saved these groups. The environment made their prompts from the step at
                # which they started, so their responses cannot continue here.
                backlog = [{**item, "responses": []} for item in backlog]
            self.partial_rollouts.load_state_dict(
                backlog, lambda index: self.processor.prompt(self.rows[index])
            )
        run_dir, num_steps = self.config.run.dir, self.config.algorithm.steps
        self.metrics = MetricsWriter(run_dir, step)
        self.samples = SampleWriter(run_dir, step, num_steps=num_steps)
        self.trackers = Trackers(config.run.trackers, run_dir, config.to_dict(), step)
        # A resumed run makes the steps after its checkpoint again, so their records are dropped.
        keep_records(Path(run_dir) / SKIPPED_FILE, lambda record: record["step"] <= step)
        self.recorded = RecordedRollouts(Path(run_dir) / ROLLOUTS_FOLDER)
        if config.run.record_rollouts:
            self.recorded.remove_after(step)

    def state_dict(self) -> dict[str, Any]:
        if self.producer is not None:
            state = self.producer.state_dict()
        else:
            backlog = self.partial_rollouts.state_dict()
            state = {**self.stream.state_dict(), "backlog": backlog}
        return {**state, "curriculum": self.curriculum.state_dict()}

    def record(
        self, step: int, metrics: dict[str, float], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        if self.producer is None:
            metrics |= self.stream.measures() | self.partial_rollouts.end_step()
        else:
            metrics |= self.producer.measures
        if self.config.curriculum.stages:
            metrics["curriculum_stage"] = float(self.curriculum.number + 1)
            self.curriculum.record(metrics["reward"])
        progress = self._progress
        if progress.failures:
            metrics["recording_failures"] = float(progress.failures)
        if self.config.run.trackers:
            metrics["tracker_failures"] = float(self.trackers.failures)
        progress.attempt("metrics", lambda: self.metrics.write(step, metrics))
        self.trackers.scalars(step, metrics)
        self.best_metric.step(metrics)
        if metrics.get("skipped_updates"):
            path = Path(self.config.run.dir) / SKIPPED_FILE
            record = {"step": step, "rows": self._planned}
            progress.attempt("skipped updates", lambda: append_record(path, record))
        written = progress.attempt("samples", lambda: self.samples.write(step, samples))
        self.trackers.samples(step, written or (), self.samples.folder)
        now, num_steps = time.monotonic(), self.config.algorithm.steps
        if self._last_line is None:
            self._progress.line(legend(metrics))
        elif now - self._last_line < LINE_EVERY and step < num_steps:
            return
        self._last_line = now
        self._progress.line(step_line(step, num_steps, metrics))

    def evaluate(self, step: int, refit: Callable[[], None]) -> None:
        """Evaluate the weights of `step` on the test rows. `refit` pushes them to servers that
        restarted.
        """
        result = evaluate(
            self.config,
            self.client,
            self.processor,
            self.episode_runner,
            self.evaluation_set,
            step,
            refit,
        )
        scalars = evaluation_scalars(result.to_dict())
        self._progress.attempt(
            "evaluations", lambda: self.metrics.write_evaluation(step, result.to_dict())
        )
        self.trackers.scalars(step, scalars)
        self.best_metric.evaluation(scalars)
        self._progress.line(result.line(f" after {step} steps"))

    @cached_property
    def evaluation_set(self) -> EvaluationSet:
        return EvaluationSet.of(
            self.config, self.processor, self.episode_runner, self.test_rows, self.rows
        )

    def close(self) -> None:
        if self.producer is not None:
            self.producer.close()
        self.stream.close()
        if self.connection is not None:
            self.episode_runner.close()
        self._progress.attempt("metrics", self.metrics.close)
        self.trackers.close()

    @property
    def client(self) -> RolloutClient:
        assert self.connection is not None, "this run has no rollout servers"
        return self.connection.client

    def start_groups(self, groups: Sequence[Group], n: int, step: int) -> list[Group]:
        """Start n episodes in each group. A prompt whose episodes cannot start is replaced by the
        next prompt of the data.
        """
        started = self.episode_runner.start_or_replace(
            groups, n, self.stream.take, stage=self.curriculum.stage(step), step=step
        )
        self.stream.skipped.update(self.episode_runner.skipped)
        self.episode_runner.skipped.clear()
        return started

    def take_groups(self, count: int, version: int, refit: Callable[[], None]) -> list[Group]:
        """Return the producer's next `count` groups for the current weight version."""
        assert self.producer is not None
        return self.producer.take(count, version, self.curriculum.stage(version), refit)

    def keep_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Write a step's groups to the run directory, for replay."""
        self._progress.attempt("rollouts", lambda: self.recorded.save(step, groups))

    def replayed_groups(self, step: int) -> list[Group]:
        """Return the groups of a step of the recorded run. Raises ValueError as
        `RecordedRollouts.load` does, or if the step has too few groups.
        """
        folder, algorithm = self.config.rollout.replay, self.config.algorithm
        assert folder is not None and isinstance(algorithm, PolicyOptimization)
        groups = RecordedRollouts(folder).load(step, self.rows, self.processor)
        if len(groups) < algorithm.prompts_per_step:
            raise ValueError(
                f"rollout.replay={folder} has {len(groups)} groups in step {step}, fewer than "
                f"algorithm.prompts_per_step={algorithm.prompts_per_step}: lower that"
            )
        return groups

    def plan(
        self,
        minibatches: Sequence[Sequence[Tree]],
        prompts: Sequence[Prompt],
        drawn: Sequence[Prompt],
        *,
        tower_trained: bool,
    ) -> StepPlan:
        """Return the plan of a step: the trees of each minibatch, packed and balanced over the data
        ranks, and the images of `prompts`. drawn: The original prompts; ranks read their images
        from the data files again, so that rank 0 need not send their pixels.
        """
        self._planned = [prompt.row.source for prompt in drawn]
        images = {image.key: image for prompt in prompts for image in prompt.images}
        trees = [tree for group in minibatches for tree in group]
        self._tower_trained = tower_trained
        self._flops = StepFlops.of(self._cost, trees, images, self._output_cost)
        grids = {key: image.grid for key, image in images.items()}
        ranks = plan_step(
            minibatches,
            num_ranks=self.mesh.data_size,
            max_tokens=self.config.data.pack_tokens,
            schedule=schedule_of(self.mesh.layout, self._cost),
            cost=lambda tree: self._cost.segments(tree, images),
        )
        layout, places = self.mesh.layout, image_places(drawn)
        return StepPlan(
            minibatches=ranks,
            images=plan_images(
                [shown_images(minibatches) for minibatches in ranks],
                grids,
                {key: self._cost.image(grid) for key, grid in grids.items()},
                slots=layout.tensor * layout.context,
                # A trained tower encodes a pack's images at once, so this many patches fit in
                # memory.
                round_patches=self.config.data.pack_tokens * self.processor.merge_size**2,
            ),
            num_tokens=sum(tree.num_tokens for tree in trees),
            sources={key: places.get(image.digest, image) for key, image in images.items()},
            tower_trained=tower_trained,
            shape=self.shape,
        )

    def utilization(
        self, passes: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return FLOPs per second and modelled seconds of the step planned last. passes: Forward
        passes of the language model, by phase. seconds: Measured seconds by phase, from
        `Phases.take`.
        """
        work = self._flops.by_phase(passes, tower_trained=self._tower_trained)
        return utilization(work, seconds, platform.peak_flops(), self.mesh.world_size)

    @property
    def shape(self) -> PackShape:
        layout, sequence = self.mesh.layout, self.config.parallel.sequence
        return PackShape(
            vision_token_ids=self.processor.vision_token_ids,
            multiple=layout.tensor if sequence else 1,
            context_size=layout.context,
        )
