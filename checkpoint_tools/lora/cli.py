"""Commands for adapters: lora-export, lora-import, lora-merge."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from checkpoint_tools.options import (
    ConsoleOptions,
    Experts,
    Force,
    HFOutputOptions,
    StepOptions,
    count_files,
    one_process,
)
from checkpoint_tools.streaming import format_bytes
from megavlm.commands import command

lora_app = typer.Typer()


@command(
    lora_app,
    "lora-export",
    epilog="Example: megavlm-convert lora-export runs/mine/checkpoints adapters/mine",
)
def _lora_export(
    checkpoint_dir: Path,
    peft_dir: Path,
    source: StepOptions,
    console: ConsoleOptions,
    base: Annotated[
        str | None,
        typer.Option(help="Name or folder of the base model (default: as the run recorded it)."),
    ] = None,
    experts: Annotated[
        Literal["stacked", "separate"],
        typer.Option(
            help="Format of adapters on experts: target_parameters, for peft with transformers 5; "
            "or a module for each expert, for servers."
        ),
    ] = "stacked",
    force: Force = False,
) -> None:
    """Export the adapters of a checkpoint, trained under any layout, as a PEFT folder.

    peft loads it on the base model of transformers 5, and SGLang serves it. Adapters on experts
    have two formats, of which peft reads one and servers the other (--experts).
    """
    one_process("lora-export")
    from checkpoint_tools.lora.export_adapters import export_adapters

    start = time.perf_counter()
    done = export_adapters(
        checkpoint_dir,
        peft_dir,
        step=source.step,
        alpha=source.alpha,
        base=base,
        separate=experts == "separate",
        force=force,
        show=console.progress,
    )
    console.report_done(
        done,
        start,
        f"{checkpoint_dir}: adapters of step {done.step} (rank {done.rank}, alpha {done.alpha:g}) "
        f"on {done.num_modules} modules, {format_bytes(done.num_bytes)}, exported to {peft_dir}",
    )


@command(
    lora_app,
    "lora-import",
    epilog="Example: megavlm-convert lora-import adapters/theirs checkpoints/theirs "
    "--base models/Qwen2.5-VL-3B-Instruct",
)
def _lora_import(
    peft_dir: Path,
    checkpoint_dir: Path,
    console: ConsoleOptions,
    base: Annotated[
        Path | None,
        typer.Option(
            help="Model folder or checkpoint that the adapters belong to (default: the folder that "
            "their configuration names)."
        ),
    ] = None,
    force: Force = False,
    experts: Experts = None,
) -> None:
    """Turn PEFT adapters and their base model into a checkpoint with the same adapters, exactly.

    Lower ranks are padded with zeros to the largest, and different scales are multiplied into B:
    without rounding if their ratio is a power of two, else in fp32.
    """
    one_process("lora-import")
    from checkpoint_tools.lora.import_adapters import import_adapters

    start = time.perf_counter()
    done = import_adapters(
        peft_dir,
        checkpoint_dir,
        base=base,
        force=force,
        experts=experts,
        show=console.progress,
    )
    console.report_done(
        done,
        start,
        f"{peft_dir}: {done.num_tensors} tensors with those of the base model, "
        f"{format_bytes(done.num_bytes)}, imported into {checkpoint_dir}",
        f"\nA recipe with these adapters has lora.rank={done.rank} lora.alpha={done.alpha:g} "
        f"lora.targets=[{','.join(done.targets)}]",
    )


@command(
    lora_app,
    "lora-merge",
    epilog="Examples: megavlm-convert lora-merge runs/mine/checkpoints models/mine; "
    "megavlm-convert lora-merge models/Qwen2.5-VL-3B-Instruct models/mine --adapter adapters/mine",
)
def _lora_merge(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint with adapters; with --adapter, the base model.")
    ],
    hf_dir: Path,
    output: HFOutputOptions,
    chosen: StepOptions,
    console: ConsoleOptions,
    adapter: Annotated[Path | None, typer.Option(help="A PEFT folder to merge.")] = None,
    experts: Experts = None,
) -> None:
    """Merge adapters into their base model, in fp32 and rounded once, as a HuggingFace folder."""
    output.check()
    one_process("lora-merge")
    from checkpoint_tools.lora.merge_adapters import merge_adapters

    start = time.perf_counter()
    done = merge_adapters(
        source,
        hf_dir,
        adapter=adapter,
        step=chosen.step,
        alpha=chosen.alpha,
        experts=experts,
        options=output.write_options(console.progress),
    )
    console.report_done(
        done,
        start,
        f"{source}: adapters of {done.num_merged} projections merged, {done.num_tensors} tensors, "
        f"{format_bytes(done.num_bytes)}, in {hf_dir}, {count_files(done.num_files)}",
        done.remarks(),
    )
