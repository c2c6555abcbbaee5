"""Batch scripts of Slurm jobs, with frozen copies of the code and the recipe that they run."""

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import checkpoint_tools
import megavlm
from megavlm.config.dump import to_yaml
from megavlm.config.schema import Config

JOB = Path(__file__).with_name("job.sh")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Options of a job. Slurm's defaults apply to options that are None or empty.

    setup: a shell command that prepares the environment, such as `source env.sh`. variables:
    environment variables as NAME=VALUE. arguments: sbatch options as written in an #SBATCH line.
    rollout_arguments, rollout_gpus_per_node: the same for the rollout nodes; if one of them is set,
    the job is heterogeneous, and the rollout nodes are a separate component.
    """

    name: str
    nodes: int = 2
    rollout_nodes: int = 1
    gpus_per_node: int = 8
    cpus_per_task: int = 32
    time: str = "24:00:00"
    warning: int = 600  # seconds before the time limit
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    array: str | None = None
    is_exclusive: bool = True
    max_requeues: int = 10
    container: str | None = None
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    mounts: tuple[str, ...] = ()
    setup: str | None = None
    variables: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    rollout_arguments: tuple[str, ...] = ()
    rollout_gpus_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.rollout_nodes >= self.nodes:
            raise ValueError(
                f"--nodes {self.nodes} cannot hold --rollout-nodes {self.rollout_nodes} and a "
                "trainer: raise the first, or lower the second (0 for colocated or local servers)"
            )
        for variable in self.variables:
            if not variable.partition("=")[0].isidentifier() or "=" not in variable:
                raise ValueError(f"--env {variable} is not NAME=VALUE: write NCCL_DEBUG=INFO, say")

        if self.is_heterogeneous and (self.array or not self.rollout_nodes):
            raise ValueError(
                "--rollout-sbatch and --rollout-gpus-per-node make a heterogeneous job, which "
                "needs --rollout-nodes, and of which Slurm makes no --array: leave them out"
            )

    @property
    def is_heterogeneous(self) -> bool:
        return bool(self.rollout_arguments or self.rollout_gpus_per_node)

    @property
    def directives(self) -> list[str]:
        """Return the #SBATCH options."""
        log = "%x-%A_%a.log" if self.array else "%x-%j.log"
        of_batch = {
            "job-name": self.name,
            "array": self.array,
            "output": log,
            "open-mode": "append",  # a requeued job continues its log
            "signal": f"B:USR1@{self.warning}",  # B: to the batch script, which forwards it
        }
        options = [*_options(of_batch), "--requeue"]
        if not self.is_heterogeneous:
            return [*options, *self._component(self.nodes, self.gpus_per_node), *self.arguments]
        rollout_gpus = self.rollout_gpus_per_node or self.gpus_per_node
        return [
            *(*options, *self._component(self.nodes - self.rollout_nodes, self.gpus_per_node)),
            *(*self.arguments, "hetjob", *self._component(self.rollout_nodes, rollout_gpus)),
            *self.rollout_arguments,
        ]

    def _component(self, nodes: int, gpus_per_node: int) -> list[str]:
        """Return the options that choose the nodes of one component."""
        given = {
            "account": self.account,
            "partition": self.partition,
            "qos": self.qos,
            "nodes": nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": gpus_per_node,
            "cpus-per-task": self.cpus_per_task,
            "time": self.time,
        }
        return [*_options(given), *(["--exclusive", "--mem=0"] if self.is_exclusive else [])]

    @property
    def srun_options(self) -> list[str]:
        if self.container is None or self.container_runtime == "apptainer":
            return []
        mounts = [f"--container-mounts={','.join(self.mounts)}"] if self.mounts else []
        return [f"--container-image={self.container}", "--container-mount-home", *mounts]

    @property
    def in_container(self) -> list[str]:
        if self.container is None or self.container_runtime == "pyxis":
            return []
        mounts = [word for mount in self.mounts for word in ("--bind", mount)]
        return ["apptainer", "exec", "--nv", *mounts, self.container]


def num_servers(tensor_parallel: int, nodes: int, gpus: int) -> int:
    """Return the number of servers on `nodes` rollout nodes with `gpus` GPUs each: several on a
    node, or each over several whole nodes.

    Raises ValueError if nodes and GPUs do not divide evenly. job.sh checks the same.
    """
    if tensor_parallel <= gpus:
        return nodes * (gpus // tensor_parallel)
    if tensor_parallel % gpus:
        raise ValueError(
            f"rollout.tensor_parallel={tensor_parallel} is more than the {gpus} GPUs of a rollout "
            "node and no multiple of them: a server over several nodes takes whole nodes"
        )
    span = tensor_parallel // gpus
    if nodes % span:
        raise ValueError(
            f"--rollout-nodes {nodes} is not a multiple of the {span} nodes of {gpus} GPUs that a "
            f"server of rollout.tensor_parallel={tensor_parallel} takes: change one of them"
        )
    return nodes // span


def batch_script(job: Job, recipe: Path, overrides: tuple[str, ...], code: Path) -> str:
    """Return the script that runs `recipe` with the packages in the folder `code`."""
    variables = {
        "ROLLOUT_NODES": job.rollout_nodes,
        "GPUS_PER_NODE": job.gpus_per_node,
        "ROLLOUT_GPUS_PER_NODE": job.rollout_gpus_per_node or job.gpus_per_node,
        "MAX_REQUEUES": job.max_requeues,
    }
    body = code / JOB.relative_to(Path(megavlm.__file__).parents[1])
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in job.directives),
        "#",
        "# Written by `megavlm launch`. The code and the recipe are copies: later changes of the",
        "# originals do not reach this job, even if it is queued again.",
        *([job.setup] if job.setup else []),
        *(f"export {name}={value}" for name, value in variables.items()),
        *(
            f"export {name}={shlex.quote(value)}"
            for name, _, value in (variable.partition("=") for variable in job.variables)
        ),
        f"export PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(code))}:$PWD:${{PYTHONPATH:-}}",
        f"srun_options=({shlex.join(job.srun_options)})",
        f"in_container=({shlex.join(job.in_container)})",
        f"source {shlex.quote(str(body))} {shlex.join([str(recipe), *overrides])}",
    ]
    return "\n".join(lines) + "\n"


def _options(given: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def freeze(config: Config, folder: Path) -> tuple[Path, Path]:
    """Copy the packages to `folder`/code and write the resolved recipe to `folder`/recipe.yaml.
    Returns both paths.
    """
    code, recipe = folder / "code", folder / "recipe.yaml"
    ignored = shutil.ignore_patterns("__pycache__")
    for package in (megavlm, checkpoint_tools):
        assert package.__file__ is not None
        source = Path(package.__file__).parent
        shutil.copytree(source, code / source.name, ignore=ignored, dirs_exist_ok=True)
    recipe.write_text(to_yaml(config), encoding="utf-8")
    return code, recipe
