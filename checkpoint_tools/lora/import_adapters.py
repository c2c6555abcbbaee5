"""Import of a PEFT folder and its base model as a checkpoint with adapters."""

from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint_tools.import_hf import write_checkpoint
from checkpoint_tools.lora.adapters import linears, lora_targets
from checkpoint_tools.lora.merge_adapters import open_base, open_peft_adapters
from checkpoint_tools.lora.peft_config import read_peft_config
from checkpoint_tools.streaming import ShowProgress, no_progress
from megavlm.checkpointing.folder import PEFT_CONFIG
from megavlm.models.common.loading import Form


@dataclass(frozen=True)
class AdapterImport:
    """Result of an import. rank, alpha and targets: values of a recipe's lora section."""

    rank: int
    alpha: float
    targets: list[str]
    num_tensors: int
    num_bytes: int


def import_adapters(
    peft_dir: Path,
    checkpoint_dir: Path,
    *,
    base: Path | None = None,
    force: bool = False,
    experts: Form | None = None,
    show: ShowProgress = no_progress,
) -> AdapterImport:
    """Write the base model's weights and the adapters as step 0.

    base: a HuggingFace folder (which may be `peft_dir`) or a checkpoint, by default the folder that
    the adapters' configuration names. Raises ValueError if adapters cannot be represented exactly
    or do not fit the model, if there is no base model, or as `output_folder` does.
    """
    if base is None:
        base = _named_base(peft_dir)
    weights = open_base(base, peft_dir, experts=experts)
    adapters = open_peft_adapters(peft_dir, weights)
    if adapters.base is None:
        adapters = replace(adapters, base=str(base))
    done = write_checkpoint(weights, checkpoint_dir, adapters=adapters, force=force, show=show)
    return AdapterImport(
        adapters.rank,
        adapters.alpha,
        lora_targets(adapters.linears, linears(weights)),
        done.num_tensors,
        done.num_bytes,
    )


def _named_base(peft_dir: Path) -> Path:
    base = read_peft_config(peft_dir).base
    if base is None or not Path(base).is_dir():
        raise ValueError(
            f"{peft_dir / PEFT_CONFIG} names the base model {base!r}, but there is no such "
            "folder: name its folder by --base."
        )
    return Path(base)
