"""The conversion command line: `megavlm-convert`, or `python -m checkpoint_tools`."""

import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from megavlm.parallel import platform

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Force = Annotated[bool, typer.Option("--force", help="Replace the output folder.")]
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@app.command("import")
def import_(
    hf_dir: Path,
    checkpoint_dir: Path,
    force: Force = False,
    experts: Annotated[
        Literal["hub", "memory"],
        typer.Option(help="How stacks of experts lie: as on the hub, or as transformers 5 saves."),
    ] = "hub",
) -> None:
    """Turn a HuggingFace model folder into a checkpoint that any layout can train from."""
    platform.install()
    from checkpoint_tools.import_hf import import_hf

    start = time.perf_counter()
    count = import_hf(hf_dir, checkpoint_dir, force=force, experts=experts)
    seconds = time.perf_counter() - start
    typer.echo(f"{hf_dir}: {count} tensors imported into {checkpoint_dir} in {seconds:.1f} s")


@app.command("export")
def export(
    checkpoint_dir: Path,
    hf_dir: Path,
    force: Force = False,
    step: Annotated[int | None, typer.Option(help="The step (default: the latest).")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, as 5GB.")] = "5GB",
) -> None:
    """Turn a checkpoint, imported or trained under any layout, into a HuggingFace model folder."""
    platform.install()
    from checkpoint_tools.export_hf import export_hf

    start = time.perf_counter()
    done = export_hf(
        checkpoint_dir,
        hf_dir,
        step=step,
        force=force,
        max_shard_bytes=_parse_size(max_shard_size),
    )
    seconds = time.perf_counter() - start
    typer.echo(
        f"{checkpoint_dir}: {done.num_tensors} tensors of step {done.step} exported to {hf_dir} "
        f"in {done.num_files} file{'s' * (done.num_files > 1)}, {seconds:.1f} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; an error of the user's is one sentence and exit code 2."""
    # megatron-core says at import what is not installed; conversion needs none of it.
    warnings.filterwarnings("ignore", message=".*not installed.*")
    try:
        app(arguments)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        typer.echo(f"error: {error.strerror}: {error.filename}.", err=True)
        sys.exit(2)


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B|)", text.strip().upper())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise ValueError(f"--max-shard-size {text!r} is not a size: write it as 5GB or 500MB.")
    return int(float(match[1]) * _UNITS[match[2]])
