"""The `megavlm` command. Everything heavy is imported by the command that needs it."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning for vision-language models on megatron-core and SGLang.",
)

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to change: run.seed=1"),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check everything, print the resolved configuration, start nothing."
    ),
]


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    data_report: Annotated[
        bool,
        typer.Option(
            "--data-report", help="Write a page about the data to the run's directory, no more."
        ),
    ] = False,
) -> None:
    """Train as RECIPE says. Under torchrun this is one rank; otherwise it starts all of them."""
    if data_report:
        from megavlm.config.load import load
        from megavlm.run.data_report import write

        typer.echo(write(load(recipe, overrides or [])))
        return
    _run("train", recipe, overrides or [], dry_run)


@app.command()
def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A checkpoint, a HuggingFace folder or an adapter's; else the recipe's model."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Another one, to compare with on the same questions.")
    ] = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="Responses to each model's questions, in all.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Evaluate the model of RECIPE on its test files, or compare two."""
    options = {"model": model, "baseline": baseline, "episodes": episodes}
    given = [
        f"evaluation.{key}={json.dumps(value)}"
        for key, value in options.items()
        if value is not None
    ]
    _run("evaluate", recipe, [*(overrides or []), *given], dry_run)


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    sync: Annotated[
        bool, typer.Option("--sync", help="What each weight sync sends, from and to which ranks.")
    ] = False,
    servers: Annotated[
        bool,
        typer.Option("--servers", help="How GPU servers are started elsewhere, in bash's words."),
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Trainer ranks, if not those of the recipe.")
    ] = None,
) -> None:
    """Print what RECIPE will do on a cluster of any size, and start nothing."""
    if sync == servers:
        raise ValueError("megavlm plan needs to know what to plan: add --sync or --servers")
    from megavlm.config.load import load
    from megavlm.parallel import platform

    platform.install()
    config = load(recipe, overrides or [])
    if servers:
        from megavlm.run.server_plan import server_plan

        typer.echo(server_plan(config))
        return
    from megavlm.run.sync_plan import sync_plan

    typer.echo(sync_plan(config, ranks or config.parallel.num_ranks))


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's directory.")],
) -> None:
    """Rebuild the reward curve and report.html of a run."""
    if not (run_dir / "metrics.jsonl").is_file():
        raise ValueError(f"{run_dir} is no run directory: it has no metrics.jsonl")
    from megavlm.observability.plots import reward_curve
    from megavlm.observability.report import write_report

    reward_curve(run_dir)
    write_report(run_dir)
    typer.echo(run_dir / "report.html")


@app.command()
def demo(
    overrides: Overrides = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with Parquet files to learn; without it, images are drawn."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of images, model and training.")] = 0,
    family: Annotated[
        str, typer.Option(help="Of the tiny model: qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe.")
    ] = "qwen2_5_vl",
    algorithm: Annotated[
        str, typer.Option(help="Of recipes/debug: grpo, ppo, gspo, dapo, rloo and others.")
    ] = "grpo",
    run_dir: Annotated[Path, typer.Option(help="Where everything is written.")] = Path("runs/demo"),
    tasks: Annotated[
        str | None,
        typer.Option(help="What to ask: colour,count,compare (the default), kind, length."),
    ] = None,
    warm_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of the warm start, if not as many as it needs to see."),
    ] = None,
) -> None:
    """Draw images, make a tiny model, warm it up, train it by reinforcement, and report.

    Keys that are changed are those of the algorithm's recipe.
    """
    if data is not None and not data.is_dir():
        raise ValueError(f"--data {data} is no folder: give one that holds Parquet files")
    from megavlm.demo import pipeline

    pipeline.run_demo(
        run_dir,
        seed=seed,
        family=family,
        algorithm=algorithm,
        data=data,
        tasks=None if tasks is None else tasks.split(","),
        warm_steps=warm_steps,
        overrides=overrides or [],
    )


def _run(
    phase: Literal["train", "evaluate"], recipe: Path, overrides: list[str], dry_run: bool
) -> None:
    from megavlm.config.load import load

    config = load(recipe, overrides)
    if "RANK" in os.environ and not dry_run:
        from megavlm.run import worker

        return worker.run(phase, config)
    from megavlm.run import preflight

    world_size = int(os.environ.get("WORLD_SIZE", config.parallel.num_ranks))
    preflight.check(config, world_size=world_size, phase=phase)
    if dry_run:
        from megavlm.config.dump import to_yaml

        typer.echo(to_yaml(config), nl=False)
        return None
    from megavlm.run.launcher import run_workers

    raise typer.Exit(run_workers([phase, str(recipe), *overrides], config.parallel.num_ranks))


def main() -> None:
    """The console script: a user's mistake is one sentence on stderr and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"megavlm: {error}", file=sys.stderr)
        sys.exit(2)
