"""The command `megavlm launch`."""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Annotated

import typer


def launch(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Recipe keys to change; %a is the number of the task in an --array.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")] = 2,
    rollout_nodes: Annotated[
        int,
        typer.Option(min=0, help="Those of them that run servers; 0: the trainer starts them."),
    ] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    cpus_per_task: Annotated[int, typer.Option(min=1, help="Cores of a node.")] = 32,
    time_limit: Annotated[str, typer.Option("--time", help="As sbatch --time.")] = "24:00:00",
    warning: Annotated[
        int, typer.Option(min=0, help="Seconds before it at which the run stops and saves.")
    ] = 600,
    account: str | None = None,
    partition: str | None = None,
    qos: str | None = None,
    array: Annotated[str | None, typer.Option(help="As sbatch --array, for sweeps.")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Share nodes with other jobs.")] = False,
    max_requeues: Annotated[
        int, typer.Option(min=0, help="How often a stopped or failed run is queued again.")
    ] = 10,
    container: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Container of all programs.")
    ] = None,
    apptainer: Annotated[
        bool, typer.Option("--apptainer", help="Run it by Apptainer, not by pyxis.")
    ] = False,
    mount: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE:TARGET", help="Mount in the container.")
    ] = None,
    setup: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Run first: 'source .venv/bin/activate', say."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Environment, NCCL's for example."),
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Further option of sbatch.")
    ] = None,
    rollout_sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION",
            help="Option of sbatch for rollout nodes alone, which other nodes than the trainer's "
            "are then (a heterogeneous job): --partition=inference.",
        ),
    ] = None,
    rollout_gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a rollout node; else --gpus-per-node.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script and submit nothing.")
    ] = False,
) -> None:
    """Submit a Slurm job that trains RECIPE on several nodes.

    The batch script, the resolved recipe and the code are copied to RUN_DIR/launch.
    """
    from megavlm.config.load import load
    from megavlm.slurm.script import Job, batch_script, freeze, num_servers

    given = overrides or []
    if any("SLURM_ARRAY_TASK_ID" in override for override in given):
        raise ValueError(
            "an override has SLURM_ARRAY_TASK_ID, which no shell replaces there: write %a for the "
            "number of the task in an array"
        )
    later = tuple(override for override in given if "%a" in override)
    now = [override for override in given if "%a" not in override]
    addresses = []
    if rollout_nodes:
        any_number = load(recipe, [*now, *_addresses(1), "rollout.min_servers=1"])
        ranks, gpus = any_number.rollout.tensor_parallel, rollout_gpus_per_node or gpus_per_node
        addresses = _addresses(num_servers(ranks, rollout_nodes, gpus))
    config = load(recipe, [*now, *addresses])
    ranks = config.rollout.tensor_parallel
    if config.rollout.mode == "managed" and ranks > gpus_per_node:
        raise ValueError(
            f"rollout.tensor_parallel={ranks} is more than the {gpus_per_node} GPUs of a node "
            "(--gpus-per-node), on which a server of rollout.mode=managed stays: lower it, or give "
            "the servers nodes of their own (--rollout-nodes)"
        )
    name = Path(config.run.dir).name
    job = Job(
        name=name,
        nodes=nodes,
        rollout_nodes=rollout_nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task,
        time=time_limit,
        warning=warning,
        account=account,
        partition=partition,
        qos=qos,
        array=array,
        is_exclusive=not shared,
        max_requeues=max_requeues,
        container=container,
        container_runtime="apptainer" if apptainer else "pyxis",
        mounts=(f"{Path.cwd()}:{Path.cwd()}", *(mount or ())),
        setup=setup,
        variables=tuple(env or ()),
        arguments=tuple(sbatch or ()),
        rollout_arguments=tuple(rollout_sbatch or ()),
        rollout_gpus_per_node=rollout_gpus_per_node,
    )
    folder = Path(config.run.dir, "launch", time.strftime("%Y%m%d-%H%M%S")).absolute()
    if dry_run:
        typer.echo(batch_script(job, recipe, tuple(given), folder / "code"), nl=False)
        return
    folder.mkdir(parents=True)
    code, frozen = freeze(config, folder)
    script = folder / "job.sbatch"
    script.write_text(batch_script(job, frozen, later, code), encoding="utf-8")
    sbatch_program = shutil.which("sbatch")
    if sbatch_program is None:
        raise ValueError(
            f"sbatch is not on this machine: submit {script} where Slurm is, or use --dry-run"
        )
    command = [sbatch_program, "--parsable", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"sbatch refused {script}: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    typer.echo(f"job {number}: {script}")


def _addresses(count: int) -> list[str]:
    """Return overrides with placeholder addresses of `count` servers: Slurm picks nodes later."""
    urls = ",".join(f"'http://later{index}:1'" for index in range(count))
    return ["rollout.mode=external", f"rollout.urls=[{urls}]"]
