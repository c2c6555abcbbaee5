"""Export of a model with its adapters merged as a HuggingFace folder."""

from pathlib import Path

from checkpoint_tools.export_hf import Export, WriteOptions, write_hf
from checkpoint_tools.lora.adapters import AdapterPairs, linears
from checkpoint_tools.lora.peft_folder import open_peft
from checkpoint_tools.lora.peft_modules import to_adapters
from checkpoint_tools.lora.step_adapters import has_adapters, step_adapters
from checkpoint_tools.weights import Weights, hub_weights, open_weights
from megavlm.models.common.loading import Form


def merge_adapters(
    source: Path,
    hf_dir: Path,
    *,
    adapter: Path | None = None,
    step: int | None = None,
    alpha: float | None = None,
    experts: Form | None = None,
    options: WriteOptions | None = None,
) -> Export:
    """Write W + scale B A, computed in fp32 and rounded once, as a HuggingFace folder.

    source: a checkpoint with adapters; or, with a PEFT folder as `adapter`, a HuggingFace folder or
    a checkpoint without adapters. `source` and `adapter` may be the same folder. Holds two tensors
    of the model in memory, and their fp32 copies. Raises ValueError if there are no adapters, or
    two kinds, or as `open_weights`, `step_adapters`, `to_adapters` and `write_hf` do.
    """
    if adapter is not None and alpha is not None:
        raise ValueError(f"{adapter} has its own alpha: leave --alpha out.")
    if adapter is not None:
        weights = open_base(source, adapter, step=step, experts=experts)
        adapters = open_peft_adapters(adapter, weights)
    else:
        weights = open_weights(source, step=step, experts=experts)
        if not has_adapters(weights):
            raise ValueError(f"{weights.path} holds no adapters: name a PEFT folder by --adapter.")
        adapters = step_adapters(weights, alpha=alpha)
    return write_hf(weights, hf_dir, adapters=adapters, options=options)


def open_base(
    base: Path, peft_dir: Path, *, step: int | None = None, experts: Form | None = None
) -> Weights:
    """Open the base model of a PEFT folder. Both may be in the same folder. Raises ValueError as
    `open_weights` does, and if the folder of the model holds other adapters.
    """
    if step is None and (base / "config.json").is_file() and base.resolve() == peft_dir.resolve():
        return hub_weights(base, experts, without_adapters=True)
    return open_weights(base, step=step, experts=experts)


def open_peft_adapters(peft_dir: Path, weights: Weights) -> AdapterPairs:
    """Open a PEFT folder's adapters for the model of `weights`.

    Raises ValueError if the weights have adapters already.
    """
    if has_adapters(weights):
        raise ValueError(
            f"{weights.path} already has adapters: merge them first (megavlm-convert lora-merge "
            f"without --adapter)."
        )
    return to_adapters(open_peft(peft_dir), linears(weights))
