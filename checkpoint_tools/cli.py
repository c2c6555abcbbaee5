"""The conversion command line: `megavlm-convert`, or `python -m checkpoint_tools`.

Everything heavy is imported by the command that needs it.
"""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from checkpoint_tools import lora_cli
from checkpoint_tools.command import (
    Alpha,
    Dtype,
    Experts,
    Force,
    Json,
    MaxShardSize,
    Quiet,
    Step,
    files,
    install_platform,
    one_process,
    parse_size,
    show,
    tell,
)
from checkpoint_tools.progress import size

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="HuggingFace model folders and PEFT adapters to Megatron checkpoints and back.",
)

app.add_typer(lora_cli.app)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"megavlm-convert {version('megavlm')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Declare the options of `megavlm-convert` itself."""


@app.command(
    "import", epilog="Example: megavlm-convert import models/Qwen2.5-VL-3B-Instruct checkpoints/3b"
)
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
    install_platform()
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
            show=show(quiet, as_json),
        )
        if not ranks.is_lead:
            return
    seconds = time.perf_counter() - start
    tell(
        {**asdict(done), "seconds": seconds},
        f"{hf_dir}: {done.num_tensors} tensors, {size(done.num_bytes)}, imported into "
        f"{checkpoint_dir} in {seconds:.1f} s",
        quiet,
        as_json,
    )


@app.command("export", epilog="Example: megavlm-convert export runs/mine/checkpoints models/mine")
def export(
    checkpoint_dir: Path,
    hf_dir: Path,
    force: Force = False,
    step: Step = None,
    max_shard_size: MaxShardSize = "5GB",
    dtype: Dtype = None,
    alpha: Alpha = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Turn a checkpoint, imported or trained under any layout, into a HuggingFace model folder.

    Adapters are merged, as lora-merge does it; lora-export takes them out instead.
    """
    max_shard_bytes = parse_size(max_shard_size)
    one_process("export")
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
        alpha=alpha,
        show=show(quiet, as_json),
    )
    seconds = time.perf_counter() - start
    tell(
        {**asdict(done), "seconds": seconds},
        f"{checkpoint_dir}: {done.num_tensors} tensors of step {done.step}, "
        f"{size(done.num_bytes)}, exported to {hf_dir} in {files(done.num_files)}, {seconds:.1f} s"
        + (f"; adapters of {done.num_merged} projections are merged" if done.num_merged else "")
        + done.remarks(),
        quiet,
        as_json,
    )


@app.command(epilog="Example: megavlm-convert inspect runs/mine/checkpoints --step 40")
def inspect(
    path: Path,
    step: Step = None,
    mapping: Annotated[
        bool, typer.Option("--mapping", help="Megatron's tensors, and HuggingFace's in them.")
    ] = False,
    experts: Experts = "hub",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show what a model folder, a checkpoint or a PEFT folder holds: parameters, dtypes, layout."""
    one_process("inspect")
    from rich.console import Console

    from checkpoint_tools import adapter_inspection, inspection
    from checkpoint_tools.peft_folder import is_peft_folder, open_peft
    from checkpoint_tools.weights import open_weights

    # Names and numbers are to be read, and copied, whole: a pipe is no narrow terminal.
    console = Console(width=None if sys.stdout.isatty() else 250)
    if is_peft_folder(path):
        if step is not None or mapping or experts != "hub":
            raise ValueError(
                f"{path} holds adapters: leave --step, --mapping and --experts out, which are of "
                f"models."
            )
        peft = open_peft(path)
        if as_json:
            typer.echo(json.dumps(adapter_inspection.summary(peft)))
        elif not quiet:
            console.print(adapter_inspection.table(peft))
        return
    weights = open_weights(path, step=step, experts=experts)
    if as_json:
        rows = {"mapping": list(inspection.mapping_rows(weights))} if mapping else {}
        typer.echo(json.dumps({**inspection.summary(weights), **rows}))
        return
    if quiet:
        return
    console.print(inspection.table(weights))
    if mapping:
        console.print(inspection.mapping_table(weights))


@app.command(epilog="Example: megavlm-convert verify models/mine runs/mine/checkpoints")
def verify(
    a: Annotated[Path, typer.Argument(help="A model folder, a checkpoint or a PEFT folder.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
    logits: Annotated[
        bool,
        typer.Option("--logits", help="Compare fp32 logits on a text and an image instead."),
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Of logits, relative to the largest (default: 0)."),
    ] = None,
    experts_a: Experts = "hub",
    experts_b: Experts = "hub",
    alpha: Alpha = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare two models bit by bit, or by their logits. Exit code 1 where they differ.

    A PEFT folder is compared with another, or with the adapters in a checkpoint.
    """
    one_process("verify")
    from checkpoint_tools import comparison
    from checkpoint_tools.adapter_comparison import compare_adapters
    from checkpoint_tools.peft_folder import is_peft_folder
    from checkpoint_tools.weights import open_both

    if logits:
        from checkpoint_tools.logits import compare_logits

        found = compare_logits(
            a, b, experts=(experts_a, experts_b), alpha=alpha, show=show(quiet, as_json)
        )
        is_equal = all(one.relative <= (tolerance or 0) for one in found)
        record: dict[str, Any] = {"logits": [asdict(one) for one in found]}
        lines = [one.sentence() for one in found]
    else:
        if tolerance is not None:
            raise ValueError("bits are equal or not: --tolerance is for --logits.")
        if is_peft_folder(a) or is_peft_folder(b):
            if (experts_a, experts_b) != ("hub", "hub"):
                raise ValueError("adapters are compared: leave --experts-a and --experts-b out.")
            result = compare_adapters(a, b, alpha=alpha, show=show(quiet, as_json))
        else:
            if alpha is not None:
                raise ValueError(
                    "tensors are compared: --alpha is for --logits, or for a PEFT folder."
                )
            left, right = open_both(a, b, (experts_a, experts_b))
            result = comparison.compare(left, right, show=show(quiet, as_json))
        is_equal = not result.different
        record, lines = asdict(result), list(comparison.sentences(result))
    tell({"is_equal": is_equal, **record}, "\n".join(lines), quiet, as_json)
    if not is_equal:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; an error of the user's is one sentence and exit code 2."""
    # megatron-core says at import what is not installed; conversion needs none of it.
    warnings.filterwarnings("ignore", message=".*not installed.*")
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        app(arguments)
    except ValueError as error:
        _fail(str(error))
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        _fail(f"{str(error.strerror or error).removesuffix('.')}{place}.")
    except RuntimeError as error:
        from megavlm.checkpointing.together import CheckpointError

        if not isinstance(error, CheckpointError):
            raise
        _fail(str(error))
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, _: Any) -> None:
    """An end as after an error: nothing half-written stays. A second signal changes nothing."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _fail(sentence: str) -> None:
    """Ranks fail together: the first speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"error: {sentence}", err=True)
    sys.exit(2)
