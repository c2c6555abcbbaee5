"""Which entries of a mapping training can change, and which have adapters: by the options."""

import re
from collections.abc import Sequence

from megavlm.models.common.config import ModelOptions
from megavlm.models.common.lora_targets import choose
from megavlm.models.common.mapping import Entry

MERGERS = ("visual.merger.", "visual.deepstack_merger_list.")
_COMPONENTS = {
    "language.attention": r"language_model\..*\.self_attention\.linear_(qkv|proj)",
    "language.mlp": r"language_model\..*\.mlp\.linear_fc[12]",
    "language.experts": r"language_model\..*\.mlp\.experts\.linear_fc[12]",
    "vision.attention": r"visual\.blocks\.\d+\.attn\..+",
    "vision.mlp": r"visual\.blocks\.\d+\.mlp\..+",
    "vision.merger": r"visual\.(merger|deepstack_merger_list\.\d+)\..+",
}


def trained_entries(
    entries: Sequence[Entry], options: ModelOptions, targets: Sequence[str] | None
) -> frozenset[int]:
    """Indices of what changes. `targets`: of adapters, beside which nothing is trained, None
    without adapters.
    """
    if targets is not None:
        return adapted_entries(entries, targets)
    return frozenset(i for i, x in enumerate(entries) if not _is_frozen(x.megatron, options))


def adapted_entries(entries: Sequence[Entry], targets: Sequence[str]) -> frozenset[int]:
    """Indices of the weights that `targets` put adapters on. ValueError as in `choose`."""
    names = {i: linear_name(entry) for i, entry in enumerate(entries)}
    components = {name: kind for name in names.values() if name and (kind := component(name))}
    chosen = choose(targets, components, has_tower=True)
    return frozenset(i for i, name in names.items() if name in chosen)


def linear_name(entry: Entry) -> str | None:
    """A linear's name as `lora.targets` has it; None for what is no linear's weight. The experts
    of a layer share one.
    """
    name = entry.megatron.removesuffix(".weight")
    if name == entry.megatron or len(entry.hf_shapes[0]) < 2:
        return None
    return name.replace(".experts.experts.", ".experts.")


def component(name: str) -> str | None:
    return next((kind for kind, rule in _COMPONENTS.items() if re.fullmatch(rule, name)), None)


def _is_frozen(key: str, options: ModelOptions) -> bool:
    if not key.startswith("visual."):
        return False
    return options.freeze_merger if key.startswith(MERGERS) else options.freeze_tower
