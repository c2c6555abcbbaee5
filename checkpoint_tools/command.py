"""What the commands share: options, and how they speak."""

import json
import os
import re
from typing import Annotated, Any, Literal

import typer

from checkpoint_tools.progress import Show, progress_bar, silent

Force = Annotated[bool, typer.Option("--force", help="Replace the output folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, no progress.")]
Step = Annotated[int | None, typer.Option(help="Of a checkpoint (default: the latest).")]
Experts = Annotated[
    Literal["hub", "memory"],
    typer.Option(help="How stacks of experts lie: as on the hub, or as transformers 5 saves."),
]
MaxShardSize = Annotated[str, typer.Option(help="Largest weight file, as 5GB.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="Of the weights (default: as they are)."),
]
Alpha = Annotated[
    float | None,
    typer.Option(help="Of the adapters (default: what their run or import has written down)."),
]
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def one_process(command: str) -> None:
    """For a command that torchrun cannot speed up."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"{command} runs in one process: start it without torchrun.")
    install_platform()


def install_platform() -> None:
    """Before the first import of megatron-core."""
    from megavlm.parallel import platform

    platform.install()


def show(quiet: bool, as_json: bool) -> Show:
    return silent if quiet or as_json else progress_bar


def tell(record: dict[str, Any], sentence: str, quiet: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(record))
    elif not quiet:
        typer.echo(sentence)


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B|)", text.strip().upper())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise ValueError(f"--max-shard-size {text!r} is not a size: write it as 5GB or 500MB.")
    return int(float(match[1]) * _UNITS[match[2]])


def files(count: int) -> str:
    return f"{count} file{'s' * (count > 1)}"
