"""The `run` section: the run directory, the seed and how a run starts."""

from dataclasses import dataclass
from typing import Literal

from megavlm.config.section import MISSING, Section, bounded
from megavlm.import_path import IMPORT_PATH


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """The run itself, for every algorithm."""

    dir: str = MISSING
    """Directory for everything that the run writes: checkpoints, metrics, samples, report and the
    resolved configuration. Required."""

    seed: int = bounded(0, least=0, most=2**63 - 1)
    """Seed of the data order, model initialisation, dropout and environments. Sampling on the
    rollout servers is not seeded."""

    resume: Literal["auto", "never"] = "auto"
    """Whether an earlier run in `run.dir` is continued. `auto` resumes from its latest checkpoint
    if there is one, so that the same command starts and restarts a run; `never` starts a new
    run."""

    record_rollouts: bool = False
    """Write each step's groups to a file in RUN_DIR/rollouts before the step's first update:
    tokens, log-probs, weight versions, rewards and turns, about 8 bytes per sampled token. Images
    of the data are referenced by their row; images that an environment made are written.
    `rollout.replay` trains on the recorded groups."""

    trackers: tuple[str, ...] = ()
    """Experiment trackers that get the metrics, evaluations, configuration and sampled images in
    addition to TensorBoard: `wandb`, an extra of megavlm, or a class by its import path,
    `package.module:Class`. The guide to watching a run has classes for SwanLab and MLflow. Set
    addresses, keys and projects by environment variables of the packages. A tracker that fails does
    not end the run (metric `tracker_failures`)."""

    profile: tuple[int, ...] = bounded((), least=1)
    """Steps, counted from 1, that torch.profiler records on the ranks of `run.profile_ranks` and on
    all rollout servers. RUN_DIR/profile/step_N.json.gz has them on one timeline with the step's
    phases, for https://ui.perfetto.dev. A profiled step is slower."""

    profile_ranks: tuple[int, ...] = bounded((0,), least=0)
    """Trainer ranks that `run.profile` records. Each adds tens of megabytes to a profile."""

    watchdog: float = bounded(3600.0, least=0.0)
    """Seconds without progress on any rank after which a run is considered hung. The stacks of all
    ranks and of the servers are then written, the rank that the others wait for is named, and the
    run ends with exit code 71. Progress is the start or end of a phase, a microbatch, a response,
    or work of a rollout server. The default is longer than loading a model or saving a checkpoint
    takes, each of which is one phase. 0 turns it off."""

    time_limit: float | None = bounded(None, above=0.0)
    """Hours after which the run stops with a checkpoint. It stops before a step, evaluation or save
    that could end later, with a margin of twice the longest step so far plus a minute. Null uses
    the end of the Slurm job (SLURM_JOB_END_TIME), and sets no limit outside of Slurm."""

    summary: bool = True
    """Print the summary tables when the run ends."""

    def check(self) -> None:
        for name in self.trackers:
            if name != "wandb" and not IMPORT_PATH.fullmatch(name):
                raise ValueError(
                    f"run.trackers names {name!r}: take wandb, or a class by its import path, "
                    "package.module:Class; docs/guides/watching.md has SwanLab's and MLflow's"
                )
