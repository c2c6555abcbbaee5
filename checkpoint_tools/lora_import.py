"""PEFT folder and its base model -> checkpoint with adapters."""

from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint_tools.adapters import linears, targets
from checkpoint_tools.import_hf import write_checkpoint
from checkpoint_tools.lora_merge import adapters_of, open_base
from checkpoint_tools.peft_config import CONFIG, read_peft_config
from checkpoint_tools.progress import Show, silent
from megavlm.models.common.loading import HUB, Form


@dataclass(frozen=True)
class AdapterImport:
    """`rank`, `alpha` and `targets`: the lora section of a recipe that has these adapters."""

    rank: int
    alpha: float
    targets: list[str]
    num_tensors: int
    num_bytes: int


def lora_import(
    peft_dir: Path,
    checkpoint_dir: Path,
    *,
    base: Path | None = None,
    force: bool = False,
    experts: Form = HUB,
    show: Show = silent,
) -> AdapterImport:
    """Writes the base model's weights and the adapters as step 0. `base`: an HF folder
    (which `peft_dir` may be too) or a checkpoint, by default the folder that the adapters name.

    ValueError for adapters that cannot be held exactly or are not of this model, without a base,
    where the output folder is in use, or its disk has no room.
    """
    if base is None:
        base = _named_base(peft_dir)
    weights = open_base(base, peft_dir, experts=experts)
    adapters = adapters_of(peft_dir, weights)
    if adapters.base is None:
        adapters = replace(adapters, base=str(base))
    done = write_checkpoint(weights, checkpoint_dir, adapters=adapters, force=force, show=show)
    return AdapterImport(
        adapters.rank,
        adapters.alpha,
        targets(adapters.linears, linears(weights)),
        done.num_tensors,
        done.num_bytes,
    )


def _named_base(peft_dir: Path) -> Path:
    base = read_peft_config(peft_dir).base
    if base is None or not Path(base).is_dir():
        raise ValueError(
            f"{peft_dir / CONFIG} names {base!r} as base model, which is no folder here: name its "
            f"folder by --base."
        )
    return Path(base)
