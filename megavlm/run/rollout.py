"""`megavlm rollout`: generates the rollouts of a recipe's steps without training, for
`rollout.replay`.
"""

from contextlib import ExitStack, closing
from dataclasses import replace

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.dump import write
from megavlm.config.schema import Config
from megavlm.environments.curriculum import Curriculum
from megavlm.inference.connect import Connection, connect
from megavlm.inference.protocol import Response, VersionSpan
from megavlm.observability.phases import Phases
from megavlm.observability.progress import Progress
from megavlm.rollout.groups import rollout_metrics, sample_records
from megavlm.rollout.local import LocalSource
from megavlm.rollout.sampler import Sampler
from megavlm.run.checks.run_lock import run_lock
from megavlm.run.model_paths import served_folder
from megavlm.training.recorder import Recorder

VERSION = "0"  # version of the weights that a run starts from


def record_rollouts(config: Config, progress: Progress) -> None:
    """Record `algorithm.steps` steps of rollouts of the model that the recipe starts from, with
    their metrics and samples. Earlier recorded rollouts in run.dir are replaced.

    Raises ValueError if the recipe samples nothing or another run is using run.dir, OSError if
    rollouts cannot be written, and the errors of a run's rollouts.
    """
    if not isinstance(config.algorithm, PolicyOptimization) or config.rollout.replay is not None:
        name = f"algorithm.name={config.algorithm.name}"
        key = name if config.rollout.replay is None else "rollout.replay"
        raise ValueError(f"megavlm rollout samples responses, but {key} samples none: change it")
    config = replace(
        config,
        run=replace(config.run, record_rollouts=True),
        algorithm=replace(config.algorithm, dynamic_sampling=0),
        distillation=replace(config.distillation, teachers={}),  # nothing is trained
        # No weights are pushed, so that nothing runs ahead of a push or is finished after one.
        rollout=replace(config.rollout, max_staleness=0, oversample=1.0),
    )
    with ExitStack() as stack:
        stack.enter_context(run_lock(config.run.dir))
        write(config, config.run.dir)
        folder = stack.enter_context(served_folder(config, None))
        connection = stack.enter_context(connect(config, folder, progress, needs_refit=False))
        served = replace(config, model=replace(config.model, folder=str(folder)))
        _record(served, connection, progress)


def _record(config: Config, connection: Connection, progress: Progress) -> None:
    algorithm, sampler = config.algorithm, Sampler(config, connection.client)
    assert isinstance(algorithm, PolicyOptimization)
    curriculum = Curriculum(config.curriculum)
    source = LocalSource(sampler, curriculum, Phases())
    recorder = Recorder(config, progress, step=0)
    with closing(recorder), closing(sampler), closing(source):
        for step in range(1, algorithm.steps + 1):
            (streamed,) = source.stream(step - 1, refit=None)
            groups = streamed.groups
            for episode in (episode for group in groups for episode in group.episodes):
                episode.responses = [_of_first_weights(r) for r in episode.responses]
            recorder.rollouts.save(step, groups)  # not best-effort, as it is in training
            metrics = rollout_metrics(groups, 0) | source.measures
            metrics |= curriculum.record(metrics["reward"])
            recorder.record_step(step, metrics, sample_records(groups, sampler.processor.pieces))
    progress.line(f"{algorithm.steps} steps of rollouts are in {recorder.rollouts.folder}")


def _of_first_weights(response: Response) -> Response:
    """Return the response with the weight version of a run's first step. Servers without a push
    report a version of their own.
    """
    spans = (VersionSpan(VERSION, 0, len(response.token_ids)),)
    return replace(response, weight_version=VERSION, spans=spans)
