"""A whole run: starts ranks and servers, runs the recipe's trainer, and finishes the run."""

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch.profiler import record_function

from megavlm.config.algorithm import DPO, PPO, SFT, PolicyOptimization
from megavlm.config.dump import changes, write
from megavlm.config.schema import Config
from megavlm.inference.connect import connect, servers_of_nodes
from megavlm.inference.server_pool.nodes import RemoteServer
from megavlm.observability.console import print_closing
from megavlm.observability.metrics import reward_points
from megavlm.observability.phases import Phases
from megavlm.observability.plots import reward_curve
from megavlm.observability.progress import Progress
from megavlm.observability.report import REPORT_FILE, write_report
from megavlm.observability.result import build_result, write_result
from megavlm.parallel import platform
from megavlm.parallel.collectives import barrier
from megavlm.parallel.mesh import TIMEOUT, Layout, build_mesh, init_distributed, own_store, shutdown
from megavlm.parallel.watchdog import Watchdog
from megavlm.process import STACKS, ExitCode
from megavlm.run.checks.reachable_files import check_reachable_files
from megavlm.run.checks.run_lock import run_lock
from megavlm.run.exit_reason import end_run
from megavlm.run.export import export_checkpoint, verify_export
from megavlm.training.base_trainer import BaseTrainer
from megavlm.training.dpo_trainer import PreferenceTrainer
from megavlm.training.driver import Driver
from megavlm.training.guards import TimeLimit
from megavlm.training.policy_trainer import PolicyTrainer
from megavlm.training.ppo_trainer import PPOTrainer
from megavlm.training.sft_trainer import SupervisedTrainer
from megavlm.training.train_state import TrainState
from megavlm.weight_sync.sync import WeightSync


def train(config: Config, progress: Progress) -> bool:
    """Train a recipe. Returns False if the run stopped before its last step. It is called on every
    rank; rank 0 is also the driver and starts the servers.
    """
    limit = TimeLimit(config.run.time_limit, time.time() - progress.elapsed)
    init_distributed()
    mesh = build_mesh(Layout.from_config(config.parallel), seed=config.run.seed)
    check_reachable_files(config)
    phases = Phases(
        platform.synchronize,
        begun=progress.show,
        before={"start of ranks": progress.elapsed},
        annotate=record_function,
    )
    watchdog = Watchdog(
        config.run.watchdog,
        phases,
        Path(config.run.dir, STACKS),
        partial(end_run, code=ExitCode.HUNG),
        store=own_store(),
        rank=mesh.rank,
        world_size=mesh.world_size,
    )
    with ExitStack() as stack:
        stack.enter_context(watchdog)
        connection, remote = None, list[RemoteServer]()
        if config.rollout.colocate and generates(config) and mesh.ranks_per_node < mesh.world_size:
            nodes = servers_of_nodes(config, config.model.folder, mesh, TIMEOUT)
            remote += stack.enter_context(nodes)
        changed: list[str] = []
        if mesh.is_driver:
            stack.enter_context(run_lock(config.run.dir))
            changed = changes(config, config.run.dir)
            if not changed:
                write(config, config.run.dir)
            if generates(config):
                with phases("start of servers"):
                    connection = stack.enter_context(
                        connect(
                            config,
                            config.model.folder,
                            progress,
                            waits=False,
                            beat=phases.beat,
                            remote=remote,
                        )
                    )
                watchdog.servers = connection.server_pool
        if config.rollout.colocate:
            # SGLang measures the free memory of shared GPUs at its start, so no rank may load its
            # model before.
            barrier(mesh)
        progress.begin("loading the model and the data")
        with phases("model"):
            train_state = TrainState.build(config, mesh, progress, phases)
        driver = None
        if mesh.is_driver:
            with phases("data"):
                driver = Driver(config, train_state.hf_config, mesh, connection, progress)
        sync = None
        if generates(config):
            sync = WeightSync.from_config(
                config,
                mesh,
                train_state.hf_config,
                train_state.entries,
                train_state.model,
                None if connection is None else connection.server_pool,
            )
            stack.callback(sync.close)
        with phases("data"):
            trainer = _trainer(train_state, driver, sync)
        trainer.setup()
        if changed:  # recorded only now, as a resume that is refused is not a start
            write(config, config.run.dir)
        if train_state.step and changed:
            progress.line(f"changed since the last start: {'; '.join(changed)}")
        complete = trainer.run(limit)
        _finish(train_state, driver, complete)
    shutdown()
    return complete


def generates(config: Config) -> bool:
    """Return True if the run needs rollout servers, for training or for evaluation."""
    evaluation = config.evaluation
    evaluates = evaluation.before or evaluation.after or evaluation.every > 0
    samples = isinstance(config.algorithm, PolicyOptimization) and config.rollout.replay is None
    return samples or evaluates


def _trainer(
    train_state: TrainState, driver: Driver | None, sync: WeightSync | None
) -> BaseTrainer:
    algorithm = train_state.config.algorithm
    trainers = {PPO: PPOTrainer, DPO: PreferenceTrainer, SFT: SupervisedTrainer}
    trainer = trainers.get(type(algorithm), PolicyTrainer)
    return trainer(train_state, driver, sync)


def _finish(train_state: TrainState, driver: Driver | None, complete: bool) -> None:
    """Export, plot and report a complete run. Collective."""
    run_dir = Path(train_state.config.run.dir)
    if not complete:
        if driver is not None:
            train_state.progress.line(f"Stopped after step {train_state.step}.")
            driver.close()
        return
    paths = {"run": run_dir, "checkpoints": train_state.folder}
    difference = None
    progress = train_state.progress
    if train_state.config.checkpoint.export_hf:
        progress.begin("exporting the model as a HuggingFace folder")
        paths["HuggingFace folder"] = folder = export_checkpoint(train_state, driver)
        if train_state.config.checkpoint.verify_export:
            progress.begin("comparing the exported model with the trained one")
            with train_state.phases("verification"):
                difference = verify_export(train_state, driver, folder)
    if driver is None:
        return
    driver.close()
    progress.begin("writing the report")
    train_state.start_step_clock()
    if curve := progress.attempt("the reward curve", lambda: reward_curve(run_dir)):
        paths["reward curve"] = curve
    paths["report"] = run_dir / REPORT_FILE
    result = build_result(
        run_dir,
        steps=train_state.step,
        seed=train_state.config.run.seed,
        extra_seconds=train_state.seconds_between_steps,
        paths={name: str(path) for name, path in paths.items()},
    )
    result["export_logit_difference"] = difference
    progress.attempt("the result", lambda: write_result(run_dir, result))
    progress.attempt("the report", lambda: write_report(run_dir))  # last, as it shows the result
    if train_state.config.run.summary:
        rewards = reward_points(run_dir)
        progress.attempt("the output", lambda: print_closing(result, rewards))
    if difference is not None:
        progress.line(
            "transformers computes the trainer's logits from the exported folder, to "
            f"{difference:.1e} of the largest."
        )
