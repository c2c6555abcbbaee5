"""The `megavlm` command. Each subcommand imports what it needs, so that --help is fast."""

import json
import os
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megavlm.commands import add_version, command
from megavlm.demo_folder import ALGORITHM, FAMILY, demo_folder
from megavlm.families import FAMILIES
from megavlm.process import ExitCode, leave, loading_packages
from megavlm.slurm.job import Job
from megavlm.task import built_in_tasks

if TYPE_CHECKING:
    from megavlm.config.schema import Config
    from megavlm.run.checks.preflight import Phase
    from megavlm.run.launcher import Nodes

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning for vision-language models on megatron-core and SGLang.",
)
add_version(app, "megavlm")


def complete_key(incomplete: str) -> list[str]:
    """Return what the shell completes a recipe's key with."""
    from megavlm.config.load import recipe_keys

    return [f"{key}=" for key in recipe_keys() if key.startswith(incomplete)]


PUBLISHED = ", ".join(task.published.name for task in built_in_tasks().values() if task.published)
Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Recipe keys to change, for example run.seed=1.",
        autocompletion=complete_key,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything, print the resolved configuration and start nothing.",
    ),
]


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    nodes: Annotated[
        int, typer.Option(min=1, envvar="MEGAVLM_NODES", help="Number of machines of the run.")
    ] = 1,
    node_rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            envvar=["MEGAVLM_NODE_RANK", "SLURM_NODEID"],
            help="Number of this machine among them, from 0.",
        ),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="MEGAVLM_MASTER",
            help="Address of machine 0, and a free port there.",
        ),
    ] = None,
    data_report: Annotated[
        bool,
        typer.Option(
            "--data-report",
            help="Write data_report.html about the recipe's data to the run directory and exit.",
        ),
    ] = False,
) -> None:
    """Train a model as described by RECIPE.

    Starts all ranks on this machine, or with --nodes its share of them. Under torchrun it is one
    of the ranks.
    """
    if data_report:
        from megavlm.config.load import load
        from megavlm.observability.progress import Progress
        from megavlm.run.data_report import data_report as write_data_report

        config = load(recipe, overrides or [])
        with Progress(sys.stderr) as progress:
            page = write_data_report(config, progress)
        typer.echo(page)
        return
    from megavlm.run.launcher import Nodes

    _run("train", recipe, overrides or [], dry_run, Nodes.given(nodes, node_rank, master))


@app.command()
def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint, HuggingFace folder or PEFT adapter to evaluate instead of the "
            "recipe's model."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Second model, evaluated on the same questions.")
    ] = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="Upper bound on the responses of each model.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Evaluate a model on the test files of RECIPE, or compare two models."""
    options = {"model": model, "baseline": baseline, "episodes": episodes}
    given = [
        f"evaluation.{key}={json.dumps(value)}"
        for key, value in options.items()
        if value is not None
    ]
    _run("evaluate", recipe, [*(overrides or []), *given], dry_run)


@app.command()
def rollout(recipe: Recipe, overrides: Overrides = None) -> None:
    """Sample the rollouts of RECIPE's steps with the model that it starts from, without training.

    They are written to RUN_DIR/rollouts, on which rollout.replay trains without servers.
    """
    _run("rollout", recipe, overrides or [], False)


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs: the trainer's (default: the recipe's) or a server node's."),
    ] = None,
    memory: Annotated[float, typer.Option(min=1, help="Memory of a GPU, in GB.")] = 80,
    search: Annotated[
        bool, typer.Option("--search", help="Print the fastest layouts that fit the GPUs.")
    ] = False,
    cluster: Annotated[
        int | None,
        typer.Option(
            min=2, help="Print the fastest split of so many GPUs between trainer and servers."
        ),
    ] = None,
    sync: Annotated[
        bool,
        typer.Option("--sync", help="Print what each weight sync sends, and between which ranks."),
    ] = False,
    servers: Annotated[
        bool,
        typer.Option(
            "--servers",
            help="Print how to start the recipe's servers on GPU nodes, as bash assignments.",
        ),
    ] = False,
) -> None:
    """Print what RECIPE will do on a cluster of any size: ranks, batches, memory and a modelled
    step, and what does not fit. Starts nothing.
    """
    if search + sync + servers + (cluster is not None) > 1:
        raise ValueError(
            "megavlm plan prints one of --search, --cluster, --sync and --servers at a time"
        )
    from megavlm.config.load import load
    from megavlm.observability.progress import Progress
    from megavlm.parallel import platform

    def changed(*keys: str) -> "Config":
        return load(recipe, [*(overrides or []), *keys])

    platform.install()
    if cluster is not None:
        from megavlm.planner.cluster import cluster_plan

        with Progress(sys.stderr) as progress:
            progress.begin("modelling splits")
            count = partial(progress.count, unit="split")
            text = cluster_plan(changed, cluster, memory * 1e9, count)
        typer.echo(text)
        return
    config = changed()
    if servers:
        from megavlm.slurm.server_plan import server_plan

        typer.echo(server_plan(config, gpus))
        return
    if sync:
        from megavlm.planner.weight_updates import weight_update_table

        typer.echo(weight_update_table(config, gpus or config.parallel.num_ranks))
        return
    from megavlm.planner.overview import run_plan
    from megavlm.planner.search import search_plan

    if search:
        with Progress(sys.stderr) as progress:
            progress.begin("modelling layouts")
            count = partial(progress.count, unit="layout")
            table = search_plan(changed, gpus, memory * 1e9, count)
        typer.echo(table)
    else:
        typer.echo(run_plan(changed, gpus, memory * 1e9))


@app.command()
def doctor(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="YAML recipe: its paths, memory and transport."),
    ] = None,
    overrides: Overrides = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Check a machine without GPUs, or as if it had none.")
    ] = False,
) -> None:
    """Check whether this machine can run RECIPE: driver, versions, limits, kernels, server, sync.

    Prints one line a check; the exit code is 1 if one failed. It starts a tiny model on two ranks,
    and a server of it.
    """
    if cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "RANK" in os.environ:
        from megavlm.config.load import load
        from megavlm.parallel import platform

        platform.install()
        from megavlm.run.doctor import ranks as doctor_ranks

        assert recipe is not None
        raise typer.Exit(0 if doctor_ranks.run(load(recipe)) else 1)
    from megavlm.demo.tiny_model import make_tiny_model
    from megavlm.parallel import platform

    platform.install()
    from megavlm.run.doctor.diagnosis import DoctorOptions, diagnose

    def make_model(folder: Path) -> None:  # heads of 64, which every kernel takes
        make_tiny_model(folder, ["red"] * 9, seed=0, hidden_size=256, vision_hidden_size=256)

    raise typer.Exit(diagnose(DoctorOptions(recipe, overrides or [], cpu), make_model))


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories.")],
    output: Annotated[Path, typer.Option(help="Page that compares several runs.")] = Path(
        "comparison.html"
    ),
) -> None:
    """Rebuild the reward curve and report.html of a run, or compare several runs on one page."""
    for run_dir in run_dirs:
        if not (run_dir / "metrics.jsonl").is_file():
            raise ValueError(f"{run_dir} is not a run directory: it has no metrics.jsonl")
    if len(run_dirs) > 1:
        from megavlm.observability.comparison import write_comparison

        write_comparison(run_dirs, output)
        typer.echo(output)
        return
    from megavlm.observability.plots import reward_curve
    from megavlm.observability.report import write_report

    (run_dir,) = run_dirs
    reward_curve(run_dir)
    write_report(run_dir)
    typer.echo(run_dir / "report.html")


@app.command()
def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory.")],
    once: Annotated[bool, typer.Option("--once", help="Print the present state and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between refreshes.")] = 2.0,
) -> None:
    """Show a running or finished run in the terminal: progress, rewards, metrics, samples.

    It reads the files of the run directory, from any machine that sees them. Where the output is no
    terminal it prints once.
    """
    if not any((run_dir / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise ValueError(
            f"{run_dir} is not a run directory: it has neither config.yaml nor metrics.jsonl"
        )
    from megavlm.observability.watch import watch as show

    show(run_dir, once=once, every=every)


@app.command()
def servers(
    action: Annotated[Literal["list", "add", "remove"], typer.Argument(help="What to do.")],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory.")],
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="Address of the server, for add, remove.")
    ] = None,
) -> None:
    """List the rollout servers of a run, or have a run with external servers take one more or let
    one go, while it runs.

    The run reads the change from RUN_DIR, so that any machine that sees RUN_DIR can ask for it. A
    resumed run keeps the change.
    """
    from megavlm.run.servers import change_servers, list_servers

    if (action == "list") != (url is None):
        raise ValueError(
            f"megavlm servers {action} needs the address of a server: add http://HOST:PORT"
            if url is None
            else "megavlm servers list lists all servers: leave the address out"
        )
    if url is None or action == "list":
        list_servers(run_dir)
    else:
        typer.echo(change_servers(run_dir, url, action))


@app.command()
def data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help=f"Data set ({PUBLISHED}), or the package of a task that has one."
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="Folder (default: data/ and its name there)."),
    ] = None,
) -> None:
    """Download a published data set, check its first rows, and print the recipe's keys for it.

    Stopped in the middle, it goes on where it was.
    """
    from megavlm.data.published import fetch_data

    typer.echo(fetch_data(name, to), nl=False)


@app.command()
def demo(
    overrides: Overrides = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with train.parquet (and test.parquet) to train on instead of generated "
            "images."
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, help="Random seed for images, model initialisation and training."),
    ] = 0,
    family: Annotated[
        str, typer.Option(help=f"Family of the tiny model: {', '.join(FAMILIES)}.")
    ] = FAMILY,
    algorithm: Annotated[
        str,
        typer.Option(
            help="Recipe of recipes/debug without its _shapes.yaml: grpo, ppo, dapo, vqa_retry, ..."
        ),
    ] = ALGORITHM,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of all outputs (default: runs/demo, or runs/demo-ppo-seed1 with these "
            "options)."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Kinds of generated questions, of colour,count,compare,kind,length "
            "(default: colour,count,compare)."
        ),
    ] = None,
    warm_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of the supervised warm start."),
    ] = None,
) -> None:
    """Train a tiny model end to end: data, model, supervised warm start, RL, evaluation, report.

    KEY=VALUE changes the recipe of the RL phase.
    """
    if data is not None and not data.is_dir():
        raise ValueError(f"--data {data} is not a folder: give one that holds Parquet files")
    from megavlm.demo import pipeline

    pipeline.run_demo(
        pipeline.DemoOptions(
            run_dir=run_dir or demo_folder(algorithm, family, seed, data),
            seed=seed,
            family=family,
            algorithm=algorithm,
            data=data,
            tasks=None if tasks is None else tasks.split(","),
            warm_steps=warm_steps,
            overrides=overrides or [],
        )
    )


@command(app, "launch")
def launch(
    recipe: Recipe,
    job: Job,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Recipe keys to change; %a is the number of the task in an --array.",
            autocompletion=complete_key,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script and submit nothing.")
    ] = False,
) -> None:
    """Submit a Slurm job that trains RECIPE on several nodes.

    The batch script, the resolved recipe and the code are copied to RUN_DIR/launch.
    """
    from megavlm.slurm.launch import launch as submit

    typer.echo(submit(recipe, overrides or [], job, dry_run=dry_run), nl=False)


def _run(
    phase: "Phase",
    recipe: Path,
    overrides: list[str],
    dry_run: bool,
    nodes: "Nodes | None" = None,
) -> None:
    from megavlm.config.load import load
    from megavlm.config.recipe import naming_files

    config = load(recipe, overrides)
    if "RANK" in os.environ and not dry_run:
        with loading_packages():
            from megavlm.run import worker

        worker.run(phase, config)
    from megavlm.observability.progress import Progress

    world_size = int(os.environ.get("WORLD_SIZE", config.parallel.num_ranks))
    with Progress(sys.stderr) as progress, naming_files(recipe, overrides):
        progress.show("checking the recipe")
        if dry_run:
            with loading_packages():  # its checks import most of what a run does
                from megavlm.run.checks.dry_run import dry_run as check_all

                resolved = check_all(config, world_size=world_size, phase=phase)
        else:
            from megavlm.run.checks import preflight

            preflight.check(config, world_size=world_size, phase=phase)
    if dry_run:
        typer.echo(resolved, nl=False)
        leave(0)
    from megavlm.run.launcher import ONE_NODE, run_workers

    nodes = nodes or ONE_NODE
    num_ranks = 1 if phase == "rollout" else nodes.ranks_of_each(world_size)
    arguments = [phase, str(recipe), *overrides]
    code = run_workers(arguments, num_ranks, nodes)
    if code in (ExitCode.STOPPED, 128 + signal.SIGINT) and nodes.rank == 0:
        _say_how_to_resume(config, arguments)
    raise typer.Exit(code)


def _say_how_to_resume(config: "Config", arguments: list[str]) -> None:
    """Print the last saved step of a run that was stopped, and the command that goes on with it."""
    kept, begin = "the command was stopped", "to start it again"
    if arguments[0] == "train":
        from megavlm.checkpointing.folder import POLICY_CHECKPOINTS, latest_step

        step = latest_step(Path(config.run.dir, POLICY_CHECKPOINTS))
        kept = "no step is saved yet" if step is None else f"the last saved step is {step}"
        begin = "to start again" if step is None else "to go on from it"
    print(f"megavlm: {kept}; {begin}: {shlex.join(['megavlm', *arguments])}", file=sys.stderr)


def main() -> None:
    """Run the command. An error is one sentence and exit code 2, or 69 where a network fails."""
    try:
        app()
    except (ValueError, ConnectionError) as error:
        print(f"megavlm: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 69)
