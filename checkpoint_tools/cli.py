"""The conversion command line: `megavlm-convert`, or `python -m checkpoint_tools`.

Everything heavy is imported by the command that needs it.
"""

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from checkpoint_tools.progress import Show, progress_bar, silent, size

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="HuggingFace model folders to Megatron checkpoints and back.",
)

Force = Annotated[bool, typer.Option("--force", help="Replace the output folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, no progress.")]
Step = Annotated[int | None, typer.Option(help="Of a checkpoint (default: the latest).")]
Experts = Annotated[
    Literal["hub", "memory"],
    typer.Option(help="How stacks of experts lie: as on the hub, or as transformers 5 saves."),
]
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@app.command("import")
def import_(
    hf_dir: Path,
    checkpoint_dir: Path,
    force: Force = False,
    experts: Experts = "hub",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Turn a HuggingFace model folder into a checkpoint that any layout can train from.

    One process is enough. Under torchrun the ranks share the work.
    """
    _install_platform()
    from checkpoint_tools.import_hf import import_hf
    from checkpoint_tools.ranks import joined

    start = time.perf_counter()
    with joined() as ranks:
        done = import_hf(
            hf_dir,
            checkpoint_dir,
            force=force,
            experts=experts,
            ranks=ranks,
            show=_show(quiet, as_json),
        )
        if not ranks.is_lead:
            return
    seconds = time.perf_counter() - start
    _tell(
        {**asdict(done), "seconds": seconds},
        f"{hf_dir}: {done.num_tensors} tensors, {size(done.num_bytes)}, imported into "
        f"{checkpoint_dir} in {seconds:.1f} s",
        quiet,
        as_json,
    )


@app.command("export")
def export(
    checkpoint_dir: Path,
    hf_dir: Path,
    force: Force = False,
    step: Step = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, as 5GB.")] = "5GB",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the weights (default: as they are)."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Turn a checkpoint, imported or trained under any layout, into a HuggingFace model folder."""
    max_shard_bytes = _parse_size(max_shard_size)
    _one_process("export")
    import torch

    from checkpoint_tools.export_hf import export_hf

    start = time.perf_counter()
    done = export_hf(
        checkpoint_dir,
        hf_dir,
        step=step,
        force=force,
        max_shard_bytes=max_shard_bytes,
        dtype=getattr(torch, dtype) if dtype else None,
        show=_show(quiet, as_json),
    )
    seconds = time.perf_counter() - start
    _tell(
        {**asdict(done), "seconds": seconds},
        f"{checkpoint_dir}: {done.num_tensors} tensors of step {done.step}, "
        f"{size(done.num_bytes)}, exported to {hf_dir} in {done.num_files} "
        f"file{'s' * (done.num_files > 1)}, {seconds:.1f} s",
        quiet,
        as_json,
    )


@app.command()
def inspect(
    path: Path,
    step: Step = None,
    mapping: Annotated[
        bool, typer.Option("--mapping", help="Megatron's tensors, and HuggingFace's in them.")
    ] = False,
    experts: Experts = "hub",
    as_json: Json = False,
) -> None:
    """Show what a HuggingFace folder or a checkpoint holds: family, parameters, dtypes, layout."""
    _one_process("inspect")
    from rich.console import Console

    from checkpoint_tools import inspection
    from checkpoint_tools.weights import open_weights

    weights = open_weights(path, step=step, experts=experts)
    if as_json:
        rows = {"mapping": list(inspection.mapping_rows(weights))} if mapping else {}
        typer.echo(json.dumps({**inspection.summary(weights), **rows}))
        return
    # Names and numbers are to be read, and copied, whole: a pipe is no narrow terminal.
    console = Console(width=None if sys.stdout.isatty() else 250)
    console.print(inspection.table(weights))
    if mapping:
        console.print(inspection.mapping_table(weights))


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(help="A HuggingFace folder or a checkpoint.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
    logits: Annotated[
        bool,
        typer.Option("--logits", help="Compare fp32 logits on a text and a picture instead."),
    ] = False,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Of logits, relative to the largest.")
    ] = 0.0,
    experts_a: Experts = "hub",
    experts_b: Experts = "hub",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare two models bit by bit, or by their logits. Exit code 1 where they differ."""
    _one_process("verify")
    from checkpoint_tools import comparison
    from checkpoint_tools.weights import open_weights

    if logits:
        from checkpoint_tools.logits import compare_logits

        found = compare_logits(a, b)
        is_equal = all(one.relative <= tolerance for one in found)
        record: dict[str, Any] = {"logits": [asdict(one) for one in found]}
        lines = [one.sentence() for one in found]
    else:
        left = open_weights(a, experts=experts_a)
        right = open_weights(b, experts=experts_b)
        result = comparison.compare(left, right, show=_show(quiet, as_json))
        is_equal = not result.different
        record, lines = asdict(result), list(comparison.sentences(result))
    _tell({"is_equal": is_equal, **record}, "\n".join(lines), quiet, as_json)
    if not is_equal:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; an error of the user's is one sentence and exit code 2."""
    # megatron-core says at import what is not installed; conversion needs none of it.
    warnings.filterwarnings("ignore", message=".*not installed.*")
    try:
        app(arguments)
    except ValueError as error:
        _fail(str(error))
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{place}.")
    except RuntimeError as error:
        from megavlm.checkpointing.together import CheckpointError

        if not isinstance(error, CheckpointError):
            raise
        _fail(str(error))


def _fail(sentence: str) -> None:
    """Ranks fail together: the first speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"error: {sentence}", err=True)
    sys.exit(2)


def _one_process(command: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"{command} runs in one process: start it without torchrun.")
    _install_platform()


def _install_platform() -> None:
    """Before the first import of megatron-core."""
    from megavlm.parallel import platform

    platform.install()


def _show(quiet: bool, as_json: bool) -> Show:
    return silent if quiet or as_json else progress_bar


def _tell(record: dict[str, Any], sentence: str, quiet: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(record))
    elif not quiet:
        typer.echo(sentence)


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B|)", text.strip().upper())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise ValueError(f"--max-shard-size {text!r} is not a size: write it as 5GB or 500MB.")
    return int(float(match[1]) * _UNITS[match[2]])
