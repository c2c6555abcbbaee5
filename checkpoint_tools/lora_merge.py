"""Adapters and the weights that they belong to -> HuggingFace folder."""

from pathlib import Path

import torch

from checkpoint_tools.adapters import Adapters, linears
from checkpoint_tools.export_hf import Export, write_hf
from checkpoint_tools.peft_folder import open_peft
from checkpoint_tools.peft_modules import to_adapters
from checkpoint_tools.progress import Show, silent
from checkpoint_tools.step_adapters import has_adapters, step_adapters
from checkpoint_tools.weights import Weights, hub_weights, open_weights
from megavlm.models.common.loading import HUB, Form


def lora_merge(
    source: Path,
    hf_dir: Path,
    *,
    adapter: Path | None = None,
    step: int | None = None,
    alpha: float | None = None,
    force: bool = False,
    experts: Form = HUB,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    show: Show = silent,
) -> Export:
    """Writes W + scale B A, computed in fp32 and rounded once to the dtype of the weights or to
    `dtype`. `source`: a checkpoint with adapters; or, with a PEFT folder as `adapter`, an HF folder
    or a checkpoint without; both may be one folder. Holds two tensors of the model in memory, and
    their fp32 forms.

    ValueError as in `open_weights`, `step_adapters` and `to_adapters`; where there are no adapters,
    or two kinds; where a sum is too large for its dtype; where the output folder is in use, or its
    disk has no room.
    """
    if adapter is not None and alpha is not None:
        raise ValueError(f"{adapter} has an alpha of its own: leave --alpha out.")
    if adapter is not None:
        weights = open_base(source, adapter, step=step, experts=experts)
        adapters = adapters_of(adapter, weights)
    else:
        weights = open_weights(source, step=step, experts=experts)
        if not has_adapters(weights):
            raise ValueError(f"{weights.path} holds no adapters: name a PEFT folder by --adapter.")
        adapters = step_adapters(weights, alpha=alpha)
    return write_hf(
        weights,
        hf_dir,
        adapters=adapters,
        force=force,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        show=show,
    )


def open_base(
    base: Path, peft_dir: Path, *, step: int | None = None, experts: Form = HUB
) -> Weights:
    """As `open_weights`, of the model that a PEFT folder's adapters are put on, beside which they
    may lie. ValueError where others lie there.
    """
    if step is None and (base / "config.json").is_file() and base.resolve() == peft_dir.resolve():
        return hub_weights(base, experts, without_adapters=True)
    return open_weights(base, step=step, experts=experts)


def adapters_of(peft_dir: Path, weights: Weights) -> Adapters:
    """A PEFT folder's, for the model of these weights; ValueError where they have some already."""
    if has_adapters(weights):
        raise ValueError(
            f"{weights.path} has adapters of its own: merge them first (megavlm-convert lora-merge "
            f"without --adapter)."
        )
    return to_adapters(open_peft(peft_dir), linears(weights))
