"""Options that several commands share, and the output of a command."""

import json
import os
import re
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import typer

from checkpoint_tools.streaming import ShowProgress, no_progress, progress_bar

Force = Annotated[bool, typer.Option("--force", help="Replace the output folder.")]
StepOption = Annotated[int | None, typer.Option(help="Step of a checkpoint (default: the latest).")]
Alpha = Annotated[
    float | None,
    typer.Option(help="Alpha of the adapters (default: as their run or import recorded it)."),
]
Experts = Annotated[
    Literal["hub", "memory"] | None,
    typer.Option(
        help="Format of stacked experts: as on the hub, or as transformers 5 saves them (default: "
        "as their shapes tell)."
    ),
]
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class StepOptions:
    """Step of a checkpoint to read, and alpha of the adapters in it."""

    step: StepOption = None
    alpha: Alpha = None


@dataclass(frozen=True)
class ConsoleOptions:
    """Output of a command on the terminal."""

    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, no progress.")] = (
        False
    )

    @property
    def progress(self) -> ShowProgress:
        return no_progress if self.quiet or self.as_json else progress_bar

    def report(self, record: dict[str, Any], sentence: str) -> None:
        """Print the result of a command, as JSON or as a sentence."""
        if self.as_json:
            typer.echo(json.dumps(record))
        elif not self.quiet:
            typer.echo(sentence)

    def report_done(self, done: Any, start: float, sentence: str, remarks: str = "") -> None:
        """Print the result of a conversion (a dataclass) with the seconds since `start`."""
        seconds = time.perf_counter() - start
        record = {**asdict(done), "seconds": seconds}
        self.report(record, f"{sentence}, {seconds:.1f} s{remarks}")


@dataclass(frozen=True)
class HFOutputOptions:
    """Weight files of a HuggingFace folder."""

    force: Force = False
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, such as 5GB.")] = "5GB"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Dtype of the weights (default: unchanged)."),
    ] = None

    def check(self) -> None:
        """Raise ValueError if `max_shard_size` is not a size. Imports nothing heavy."""
        _ = self.max_shard_bytes

    def write_options(
        self, show: ShowProgress, experts: Literal["hub", "memory"] | None = None
    ) -> Any:
        """Return checkpoint_tools.export_hf.WriteOptions."""
        import torch

        from checkpoint_tools.export_hf import WriteOptions

        dtype = getattr(torch, self.dtype) if self.dtype else None
        return WriteOptions(self.force, self.max_shard_bytes, dtype, experts, show)

    @property
    def max_shard_bytes(self) -> int:
        """Size of the largest weight file."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B|)", self.max_shard_size.strip().upper())
        if match is None or match[2] not in _UNITS or float(match[1]) == 0:
            raise ValueError(
                f"--max-shard-size {self.max_shard_size!r} is not a size: write it as 5GB or 500MB."
            )
        return int(float(match[1]) * _UNITS[match[2]])


def one_process(name: str) -> None:
    """Install the platform. Raises ValueError under torchrun: `name` needs a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"{name} runs in one process: start it without torchrun.")
    install_platform()


def install_platform() -> None:
    """Install the platform. Call this before the first import of megatron-core."""
    from megavlm.parallel import platform

    platform.install()


def count_files(count: int) -> str:
    return f"{count} file{'s' * (count > 1)}"
