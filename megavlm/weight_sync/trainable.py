"""Mapping entries that training can change, and entries that have LoRA adapters."""

from collections.abc import Sequence

from megavlm.models.common.components import lora_component, model_part
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.lora_targets import choose
from megavlm.models.common.mapping import Entry


def trained_entries(
    entries: Sequence[Entry], options: ModelOptions, targets: Sequence[str] | None
) -> frozenset[int]:
    """Return the indices of the entries that training can change.

    targets: `lora.targets`; only the weights of these linears and a draft head change, the first by
    merging their adapters. None without adapters.
    """
    if targets is not None:
        heads = (i for i, x in enumerate(entries) if x.megatron.startswith("draft_head."))
        return adapted_entries(entries, targets).union(heads)
    return frozenset(
        i for i, x in enumerate(entries) if not (x.frozen or _is_frozen(x.megatron, options))
    )


def adapted_entries(entries: Sequence[Entry], targets: Sequence[str]) -> frozenset[int]:
    """Return the indices of the weights that have adapters. Raises ValueError as `choose` does."""
    names = {i: linear_name(entry) for i, entry in enumerate(entries)}
    components = {name: kind for name in names.values() if name and (kind := lora_component(name))}
    chosen = choose(targets, components, has_tower=True)
    return frozenset(i for i, name in names.items() if name in chosen)


def linear_name(entry: Entry) -> str | None:
    """Return a linear's name as `lora.targets` uses it; None for other weights.

    The experts of a layer share a name.
    """
    name = entry.megatron.removesuffix(".weight")
    if name == entry.megatron or len(entry.hf_shapes[0]) < 2:
        return None
    return name.replace(".experts.experts.", ".experts.")


def _is_frozen(key: str, options: ModelOptions) -> bool:
    if not key.startswith("visual."):
        return False
    return options.freeze_merger if model_part(key) == "merger" else options.freeze_tower
