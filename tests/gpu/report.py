"""Writer of tests/benchmarks/GPU.md: what `make gpu` measured, on which machine and versions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "benchmarks" / "GPU.md"
GB = 1e9


def render(results: Mapping[str, Any]) -> str:
    """Return the page. results: `machine`, `versions`, `command` and `date`; `parity` and `figures`
    by model; `linear attention`, errors; `grpo`, a summary. Parts that were not
    measured are left out.
    """
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# Measured on a GPU",
        "",
        f"{results['machine']}; {versions}. Random weights. `{results['command']}`, "
        f"{results['date']}.",
    ]
    if parity := results.get("parity"):
        lines += ["", "## Parity in bf16", "", *_parity(parity)]
    if kernel := results.get("linear attention"):
        lines += ["", "## Gated DeltaNet's kernel in bf16", "", *_kernel(kernel)]
    for name, tables in results.get("figures", {}).items():
        lines += ["", f"## {name}", "", *_figures(tables)]
    if grpo := results.get("grpo"):
        lines += ["", f"## GRPO with a colocated server, {grpo['model']}", "", *_grpo(grpo)]
    return "\n".join(lines) + "\n"


def _parity(parity: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    rows = [
        [model, name, f"{scores['logprobs']:.2e}", f"{scores['gradient']:.4f}"]
        for model, found in parity.items()
        for name, scores in found.items()
    ]
    about = "Root mean square error of log-probs from transformers' in fp32, and the norm of the"
    return [
        f"{about}\ngradient over its norm. The weights are the same, and bf16 holds them exactly.",
        "",
        *_table(["Model", "In bf16", "Log-probs", "Gradient"], rows),
    ]


def _kernel(errors: Mapping[str, Mapping[str, float]]) -> list[str]:
    rounding = errors["rounding"]
    rows = [[name, f"{x:.1e}", f"{rounding[name]:.1e}"] for name, x in errors["kernel"].items()]
    return [
        "Root mean square error of the output and of each input's gradient, over a tree, relative",
        "to PyTorch's operations in fp32; and that of rounding them to bf16 alone.",
        "",
        *_table(["Tensor", "Kernel", "Rounding"], rows),
    ]


def _figures(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    phases = [
        [
            row["phase"],
            _seconds(row),
            f"{row['tokens_per_second']:,.0f}",
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            _gigabytes(row),
        ]
        for row in tables["phases"]
    ]
    savings = [
        [row["saving"], *(f"{_seconds(row[x])}, {_gigabytes(row[x])}" for x in ("on", "off"))]
        for row in tables["savings"]
    ]
    chunks = [
        [
            f"{row['chunk']:,}{' (default)' if row['is_default'] else ''}",
            _seconds(row),
            _gigabytes(row),
        ]
        for row in tables["chunks"]
    ]
    targets = tables["chunks"][0]["targets"]
    return [
        *_table(["Phase", "Seconds", "Tokens/s", "MFU", "Peak memory"], phases),
        "",
        *_table(["Saving", "On", "Off"], savings),
        "",
        *_table([f"Chunk of log-probs, {targets:,} targets", "Seconds", "Peak memory"], chunks),
    ]


def _grpo(grpo: Mapping[str, Any]) -> list[str]:
    seconds = [[name, f"{value:.2f}"] for name, value in grpo["seconds"].items()]
    memory = [
        [step, f"{low / GB:.1f} GB", f"{high / GB:.1f} GB"]
        for step, (low, high) in grpo["memory"].items()
    ]
    return [
        f"Medians of the steps after the second. A sync of {grpo['sync_tensors']:.0f} tensors, "
        f"{grpo['sync_bytes'] / GB:.2f} GB, {grpo['sync_checked']:.0f} checksums; "
        f"{grpo['tokens_per_second']:,.0f} tokens/s; the trainer's peak is "
        f"{grpo['trainer_gib']:.1f} GiB.",
        "",
        *_table(["Phase", "Seconds"], seconds),
        "",
        *_table(["Step", "Least memory in use", "Most"], memory),
    ]


def _seconds(row: Mapping[str, Any]) -> str:
    return f"{row['seconds']:.3f} s"


def _gigabytes(row: Mapping[str, Any]) -> str:
    return f"{row['gigabytes']:.1f} GB"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
