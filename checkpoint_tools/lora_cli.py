"""The commands for adapters: lora-export, lora-import, lora-merge."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

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
    one_process,
    parse_size,
    show,
    tell,
)
from checkpoint_tools.progress import size

app = typer.Typer()


@app.command(
    "lora-export",
    epilog="Example: megavlm-convert lora-export runs/mine/checkpoints adapters/mine",
)
def lora_export(
    checkpoint_dir: Path,
    peft_dir: Path,
    base: Annotated[
        str | None,
        typer.Option(help="Name or folder of the base model (default: what the run names)."),
    ] = None,
    alpha: Alpha = None,
    force: Force = False,
    step: Step = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Take the adapters out of a checkpoint, trained under any layout, as a PEFT folder.

    peft loads it on the base model of transformers 5; SGLang serves it. Experts are the exception:
    they become target_parameters, which peft reads and servers do not: use lora-merge for these.
    """
    one_process("lora-export")
    from checkpoint_tools import lora_export as work

    start = time.perf_counter()
    done = work.lora_export(
        checkpoint_dir,
        peft_dir,
        step=step,
        alpha=alpha,
        base=base,
        force=force,
        show=show(quiet, as_json),
    )
    seconds = time.perf_counter() - start
    tell(
        {**asdict(done), "seconds": seconds},
        f"{checkpoint_dir}: adapters of step {done.step} (rank {done.rank}, alpha {done.alpha:g}) "
        f"on {done.num_modules} modules, {size(done.num_bytes)}, exported to {peft_dir} in "
        f"{seconds:.1f} s",
        quiet,
        as_json,
    )


@app.command(
    "lora-import",
    epilog="Example: megavlm-convert lora-import adapters/theirs checkpoints/theirs "
    "--base models/Qwen2.5-VL-3B-Instruct",
)
def lora_import(
    peft_dir: Path,
    checkpoint_dir: Path,
    base: Annotated[
        Path | None,
        typer.Option(
            help="Model folder or checkpoint that the adapters belong to (default: the folder that "
            "they name)."
        ),
    ] = None,
    force: Force = False,
    experts: Experts = "hub",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Turn PEFT adapters and their base model into a checkpoint with the same adapters, exactly.

    Other ranks are filled up with zeros to the largest, other scales are multiplied into B: without
    rounding where their ratio is a power of two, else in fp32.
    """
    one_process("lora-import")
    from checkpoint_tools import lora_import as work

    start = time.perf_counter()
    done = work.lora_import(
        peft_dir,
        checkpoint_dir,
        base=base,
        force=force,
        experts=experts,
        show=show(quiet, as_json),
    )
    seconds = time.perf_counter() - start
    tell(
        {**asdict(done), "seconds": seconds},
        f"{peft_dir}: {done.num_tensors} tensors with those of the base model, "
        f"{size(done.num_bytes)}, imported into {checkpoint_dir} in {seconds:.1f} s\n"
        f"A recipe with these adapters has lora.rank={done.rank} lora.alpha={done.alpha:g} "
        f"lora.targets=[{','.join(done.targets)}]",
        quiet,
        as_json,
    )


@app.command(
    "lora-merge",
    epilog="Examples: megavlm-convert lora-merge runs/mine/checkpoints models/mine; "
    "megavlm-convert lora-merge models/Qwen2.5-VL-3B-Instruct models/mine --adapter adapters/mine",
)
def lora_merge(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint with adapters; with --adapter, the base model.")
    ],
    hf_dir: Path,
    adapter: Annotated[Path | None, typer.Option(help="A PEFT folder to merge.")] = None,
    alpha: Alpha = None,
    force: Force = False,
    step: Step = None,
    experts: Experts = "hub",
    max_shard_size: MaxShardSize = "5GB",
    dtype: Dtype = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Merge adapters into their base model, in fp32 and rounded once, as a HuggingFace folder."""
    max_shard_bytes = parse_size(max_shard_size)
    one_process("lora-merge")
    import torch

    from checkpoint_tools import lora_merge as work

    start = time.perf_counter()
    done = work.lora_merge(
        source,
        hf_dir,
        adapter=adapter,
        step=step,
        alpha=alpha,
        force=force,
        experts=experts,
        max_shard_bytes=max_shard_bytes,
        dtype=getattr(torch, dtype) if dtype else None,
        show=show(quiet, as_json),
    )
    seconds = time.perf_counter() - start
    tell(
        {**asdict(done), "seconds": seconds},
        f"{source}: adapters of {done.num_merged} projections merged, {done.num_tensors} tensors, "
        f"{size(done.num_bytes)}, in {hf_dir}, {files(done.num_files)}, {seconds:.1f} s"
        + done.remarks(),
        quiet,
        as_json,
    )
