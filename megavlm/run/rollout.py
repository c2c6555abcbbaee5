"""`megavlm rollout`: generates the rollouts of a recipe's steps without training, for
`rollout.replay`.
"""

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.dump import write
from megavlm.config.schema import Config
from megavlm.inference.connect import Connection, connect
from megavlm.inference.protocol import Response, VersionSpan
from megavlm.observability.progress import Progress
from megavlm.rollout.groups import rollout_metrics, sample_records
from megavlm.rollout.trajectory import Group
from megavlm.run.checks.run_lock import run_lock
from megavlm.run.model_paths import served_folder
from megavlm.training.driver import Driver
from megavlm.training.evaluation import sampling

VERSION = "0"  # version of the weights that a run starts from


def record_rollouts(config: Config, progress: Progress) -> None:
    """Record `algorithm.steps` steps of rollouts of the model that the recipe starts from, with
    their metrics and samples. Earlier recorded rollouts in run.dir are replaced.

    Raises ValueError if the recipe samples nothing or another run is using run.dir, OSError if
    rollouts cannot be written, and the errors of a run's rollouts.
    """
    if not isinstance(config.algorithm, PolicyOptimization) or config.rollout.replay is not None:
        key = "algorithm.name=sft" if config.rollout.replay is None else "rollout.replay"
        raise ValueError(f"megavlm rollout samples responses, and {key} samples none: change it")
    config = replace(
        config,
        run=replace(config.run, record_rollouts=True),
        rollout=replace(config.rollout, max_staleness=0),  # no weights are pushed
    )
    with ExitStack() as stack:
        stack.enter_context(run_lock(config.run.dir))
        write(config, config.run.dir)
        folder = stack.enter_context(served_folder(config, None))
        connection = stack.enter_context(connect(config, folder, progress, needs_refit=False))
        served = replace(config, model=replace(config.model, folder=str(folder)))
        _record(served, connection, progress)


def _record(config: Config, connection: Connection, progress: Progress) -> None:
    # Imported late, because it imports megatron-core, and the platform must be installed before.
    from checkpoint_tools.hf_config import read_config

    algorithm = config.algorithm
    assert isinstance(algorithm, PolicyOptimization)
    mesh: Any = None  # only plans need a mesh
    with closing(
        Driver(config, read_config(Path(config.model.folder)), mesh, connection, progress)
    ) as driver:
        driver.start(0, None)
        how = sampling(config, driver.processor)
        skip = config.rollout.timed_out != "fail"
        generate = partial(connection.client.generate, sampling=how, skip_timed_out=skip)
        for step in range(1, algorithm.steps + 1):
            groups: list[Group] = []
            while (missing := algorithm.prompts_per_step - len(groups)) > 0:
                taken = driver.partial_rollouts.take(missing, driver.stream.take)
                started = driver.start_groups(taken, algorithm.responses_per_prompt, step - 1)
                driver.episode_runner.play(started, generate)
                groups += driver.partial_rollouts.split(started)
            for episode in (episode for group in groups for episode in group.episodes):
                episode.responses = [_of_first_weights(r) for r in episode.responses]
            driver.recorded.save(step, groups)  # not best-effort, as it is in training
            samples = sample_records(groups, driver.processor.pieces)
            driver.record(step, rollout_metrics(groups, 0), samples)
    progress.line(f"{algorithm.steps} steps of rollouts are in {driver.recorded.folder}")


def _of_first_weights(response: Response) -> Response:
    """Return the response with the weight version of a run's first step. Servers without a push
    report a version of their own.
    """
    spans = (VersionSpan(VERSION, 0, len(response.token_ids)),)
    return replace(response, weight_version=VERSION, spans=spans)
