"""Components of a model, by the names of its tensors and linear layers.

A name is a path in the whole model, as in checkpoints and in `lora.targets`. Whatever the names on
the hub are (a family's mapping has them), the tower of every family has `blocks` with `attn` and
`mlp`; modules with "merger" in their name are its mergers, which `model.freeze_merger` freezes. An
audio tower is a part of it, `audio`, with blocks of its own.
"""

import re
from typing import Literal

# Linear layers of each component of `lora.targets` (config.lora.COMPONENTS), mergers with their
# norms. Experts are `experts.experts` in checkpoints, and share one name in `lora.targets`.
LINEARS = {
    "language.attention": r"language_model\..*\.self_attention\.linear_(qkv|proj)",
    "language.linear_attention": r"language_model\..*\.self_attention\.(in|out)_proj",
    "language.mlp": r"language_model\..*\.mlp\.(shared_experts\.)?linear_fc[12]",
    "language.experts": r"language_model\..*\.mlp\.experts\.(experts\.)?linear_fc[12]",
    "vision.attention": r"visual\.(audio\.)?blocks\.\d+\.attn\..+",
    "vision.mlp": r"visual\.(audio\.)?blocks\.\d+\.mlp\..+",
    "vision.merger": r"visual\.\w*merger\w*\..*",
}
ModelPart = Literal["tower", "merger", "embedding", "attention", "mlp", "experts", "output"]


def lora_component(linear: str) -> str | None:
    """Return the component of a linear layer, or None if it cannot have an adapter."""
    return next((name for name, rule in LINEARS.items() if re.fullmatch(rule, linear)), None)


def model_part(key: str) -> ModelPart:
    """Return the part of the model that a tensor belongs to.

    A layer's norm belongs to the module that follows it, a router to its experts, and the final
    norm and a value head to the output layer.
    """
    names = key.split(".")
    if names[0] == "visual":
        return "merger" if lora_component(key) == "vision.merger" else "tower"
    if "embedding" in names:
        return "embedding"
    if "self_attention" in names:
        return "attention"
    if {"experts", "shared_experts", "router", "pre_mlp_layernorm"} & {*names}:
        return "experts"
    return "mlp" if "mlp" in names else "output"
