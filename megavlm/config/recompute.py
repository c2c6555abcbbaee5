"""The `recompute` section: activations that the backward pass recomputes."""

from dataclasses import dataclass
from typing import Literal

from megavlm.config.section import Section, bounded

RECOMPUTED_MODULES = {"core_attn", "mlp", "moe"}  # megatron-core's, without Transformer Engine


@dataclass(frozen=True, kw_only=True)
class Recompute(Section):
    """Activation recomputation. It saves memory for at most about a third more computation."""

    language: Literal["none", "selective", "full"] = "none"
    """Activations of the language model to recompute: none, the activations of `recompute.modules`
    (selective, arXiv 2205.05198), or all except the inputs of every `recompute.layers` layers
    (full)."""

    modules: tuple[str, ...] = ("core_attn",)
    """Modules that selective recomputation covers: core_attn, mlp or moe. The default is the same
    as megatron-core's, since attention needs much memory for little computation."""

    layers: int = bounded(1, least=1)
    """Layers between two kept inputs with full recomputation. The number must divide the layers of
    a pipeline chunk."""

    tower: bool = False
    """Recompute the activations of each block of the vision tower, if the tower is trained."""

    def check(self) -> None:
        unknown = set(self.modules) - RECOMPUTED_MODULES
        if unknown:
            raise ValueError(
                f"recompute.modules names {sorted(unknown)[0]}, but it cannot be recomputed: "
                f"choose from {', '.join(sorted(RECOMPUTED_MODULES))}"
            )
