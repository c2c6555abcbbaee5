"""Command line of the conversion: `megavlm-convert`, or `python -m checkpoint_tools`.

Heavy modules are imported by the commands that need them.
"""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from checkpoint_tools.lora.cli import lora_app
from checkpoint_tools.options import (
    Alpha,
    ConsoleOptions,
    Experts,
    Force,
    HFOutputOptions,
    StepOption,
    StepOptions,
    count_files,
    install_platform,
    one_process,
)
from checkpoint_tools.streaming import format_bytes
from megavlm.commands import add_version, command
from megavlm.process import CheckpointError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="HuggingFace model folders and PEFT adapters to Megatron checkpoints and back.",
)
app.add_typer(lora_app)
add_version(app, "megavlm-convert")


@command(
    app,
    "import",
    epilog="Example: megavlm-convert import models/Qwen2.5-VL-3B-Instruct checkpoints/3b",
)
def _import(
    hf_dir: Path,
    checkpoint_dir: Path,
    console: ConsoleOptions,
    force: Force = False,
    experts: Experts = None,
) -> None:
    """Turn a HuggingFace model folder into a checkpoint that any layout can train from.

    One process is enough. Under torchrun the ranks share the work.
    """
    install_platform()
    from checkpoint_tools.import_hf import import_hf, join_ranks

    start = time.perf_counter()
    with join_ranks() as ranks:
        done = import_hf(
            hf_dir,
            checkpoint_dir,
            force=force,
            experts=experts,
            ranks=ranks,
            show=console.progress,
        )
        if not ranks.is_lead:
            return
    console.report_done(
        done,
        start,
        f"{hf_dir}: {done.num_tensors} tensors, {format_bytes(done.num_bytes)}, imported into "
        f"{checkpoint_dir}",
    )


@command(
    app,
    "export",
    epilog="Example: megavlm-convert export runs/mine/checkpoints models/mine",
)
def _export(
    checkpoint_dir: Path,
    hf_dir: Path,
    output: HFOutputOptions,
    source: StepOptions,
    console: ConsoleOptions,
    experts: Annotated[
        Literal["hub", "memory"] | None,
        typer.Option(
            help="Format of stacked experts: as on the hub, or as transformers 5 saves them "
            "(default: that of the folder that the checkpoint was made of)."
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            help="Model folder whose names of tensors and other files are written, such as the "
            "authors' release (default: the folder that the checkpoint was made of)."
        ),
    ] = None,
) -> None:
    """Turn a checkpoint, imported or trained under any layout, into a HuggingFace model folder.

    Adapters are merged, as lora-merge does; lora-export exports only them.
    """
    output.check()
    one_process("export")
    from checkpoint_tools.export_hf import export_hf

    start = time.perf_counter()
    done = export_hf(
        checkpoint_dir,
        hf_dir,
        step=source.step,
        alpha=source.alpha,
        like=like,
        options=output.write_options(console.progress, experts),
    )
    merged = f"; adapters of {done.num_merged} projections are merged" if done.num_merged else ""
    console.report_done(
        done,
        start,
        f"{checkpoint_dir}: {done.num_tensors} tensors of step {done.step}, "
        f"{format_bytes(done.num_bytes)}, exported to {hf_dir} in {count_files(done.num_files)}",
        merged + done.remarks(),
    )


@command(
    app,
    "inspect",
    epilog="Example: megavlm-convert inspect runs/mine/checkpoints --step 40",
)
def _inspect(
    path: Path,
    console: ConsoleOptions,
    step: StepOption = None,
    mapping: Annotated[
        bool,
        typer.Option(
            "--mapping", help="List Megatron tensors and the HuggingFace tensors in them."
        ),
    ] = False,
    experts: Experts = None,
) -> None:
    """Show parameters, dtypes and layout of a model folder, a checkpoint or a PEFT folder."""
    one_process("inspect")
    from rich.console import Console

    from checkpoint_tools import inspect_weights
    from checkpoint_tools.lora import inspect as inspect_peft
    from checkpoint_tools.lora.peft_folder import is_peft_folder, open_peft
    from checkpoint_tools.weights import open_weights

    # Without a terminal, the console is wide enough that no table is cut off.
    terminal = Console(width=None if sys.stdout.isatty() else 250)
    if is_peft_folder(path):
        if step is not None or mapping or experts is not None:
            raise ValueError(
                f"{path} holds adapters: leave out --step, --mapping and --experts, as they "
                f"apply to models only."
            )
        peft = open_peft(path)
        if console.as_json:
            typer.echo(json.dumps(inspect_peft.peft_summary(peft)))
        elif not console.quiet:
            terminal.print(inspect_peft.peft_table(peft))
        return
    weights = open_weights(path, step=step, experts=experts)
    if console.as_json:
        rows = {"mapping": list(inspect_weights.mapping_rows(weights))} if mapping else {}
        typer.echo(json.dumps({**inspect_weights.weights_summary(weights), **rows}))
        return
    if console.quiet:
        return
    terminal.print(inspect_weights.weights_table(weights))
    if mapping:
        terminal.print(inspect_weights.mapping_table(weights))


@dataclass(frozen=True)
class _ExpertsOptions:
    """Formats of the stacked experts of the two models."""

    experts_a: Experts = None
    experts_b: Experts = None


@command(
    app,
    "verify",
    epilog="Example: megavlm-convert verify models/mine runs/mine/checkpoints",
)
def _verify(
    a: Annotated[Path, typer.Argument(help="A model folder, a checkpoint or a PEFT folder.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
    formats: _ExpertsOptions,
    console: ConsoleOptions,
    logits: Annotated[
        bool,
        typer.Option("--logits", help="Compare fp32 logits on a text and an image instead."),
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Bound of logit differences over the largest logit (default: 0)."),
    ] = None,
    alpha: Alpha = None,
) -> None:
    """Compare two models bit by bit, or by their logits. Exit code 1 if they differ.

    A PEFT folder is compared with another, or with the adapters in a checkpoint.
    """
    one_process("verify")
    from checkpoint_tools.compare_weights import compare_weights, sentences
    from checkpoint_tools.lora.compare import compare_adapters
    from checkpoint_tools.lora.peft_folder import is_peft_folder
    from checkpoint_tools.weights import open_both

    experts = formats.experts_a, formats.experts_b
    if logits:
        from checkpoint_tools.compare_logits import compare_logits

        found = compare_logits(a, b, experts=experts, alpha=alpha, show=console.progress)
        is_equal = all(one.relative <= (tolerance or 0) for one in found)
        record: dict[str, Any] = {"logits": [asdict(one) for one in found]}
        lines = [one.sentence() for one in found]
    else:
        if tolerance is not None:
            raise ValueError("bits are equal or not: --tolerance is for --logits.")
        if is_peft_folder(a) or is_peft_folder(b):
            if experts != (None, None):
                raise ValueError("adapters are compared: leave --experts-a and --experts-b out.")
            result = compare_adapters(a, b, alpha=alpha, show=console.progress)
        else:
            if alpha is not None:
                raise ValueError(
                    "tensors are compared: --alpha is for --logits, or for a PEFT folder."
                )
            left, right = open_both(a, b, experts)
            result = compare_weights(left, right, show=console.progress)
        is_equal = not result.different
        record, lines = asdict(result), list(sentences(result))
    console.report({"is_equal": is_equal, **record}, "\n".join(lines))
    if not is_equal:
        raise typer.Exit(1)


@command(
    app,
    "draft-head",
    epilog="Example: megavlm-convert draft-head models/Qwen3-VL-4B-Instruct models/4b-head",
)
def _draft_head(
    hf_dir: Annotated[Path, typer.Argument(help="A model folder of Qwen2.5-VL or Qwen3-VL.")],
    head_dir: Path,
    console: ConsoleOptions,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    force: Force = False,
) -> None:
    """Write a new EAGLE-3 draft head, with random weights, for speculation.train to train."""
    one_process("draft-head")
    from checkpoint_tools.draft_head import make_draft_head

    count = make_draft_head(hf_dir, head_dir, seed=seed, force=force)
    console.report(
        {"num_parameters": count},
        f"a head of {count / 1e6:.1f} million parameters for {hf_dir}, written to {head_dir}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. A user's error is printed as one sentence, with exit code 2."""
    # megatron-core warns at import about packages that are missing; conversion needs none of them.
    warnings.filterwarnings("ignore", message=".*not installed.*")
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        app(arguments)
    except (ValueError, CheckpointError) as error:
        _fail(str(error))
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        _fail(f"{str(error.strerror or error).removesuffix('.')}{place}.")
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, _: Any) -> None:
    """Exit in the same way as after an error, so that partial output is removed. Ignores a second
    signal.
    """
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _fail(sentence: str) -> None:
    """Print an error and exit. Only rank 0 prints, because ranks fail together."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"error: {sentence}", err=True)
    sys.exit(2)
