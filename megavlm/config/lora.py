"""The `lora` section: low-rank adapters (arXiv 2106.09685), and the names of their targets."""

from dataclasses import dataclass

from megavlm.config.section import Section, bounded

# Groups of linear layers that a target can name.
COMPONENTS = (
    "language.attention",
    "language.linear_attention",
    "language.mlp",
    "language.experts",
    "vision.attention",
    "vision.mlp",
    "vision.merger",
)
# Prefixes of full module paths.
LANGUAGE, VISION = "language_model.", "visual."
# Targets that SGLang serves as adapters, and SGLang's names of their projections.
SERVED_TARGETS = {
    "language.attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "language.mlp": ("gate_proj", "up_proj", "down_proj"),
    "language.experts": ("gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True, kw_only=True)
class LoRA(Section):
    """Low-rank adapters, trained instead of the model's own weights."""

    rank: int = bounded(0, least=0)
    """Rank of every adapter. 0 trains the weights themselves."""

    alpha: float = bounded(32.0, above=0)
    """Numerator of the adapters' scale: B A x is multiplied by `alpha` / `rank`."""

    dropout: float = bounded(0.0, least=0, below=1)
    """Dropout rate of the adapters' input in training. 0 keeps the log-probs of trainer and rollout
    servers comparable."""

    targets: tuple[str, ...] = ("language.attention", "language.mlp")
    """Linear layers that get adapters. A target is a component (language.attention,
    language.linear_attention, language.mlp, language.experts, vision.attention, vision.mlp,
    vision.merger) or the full path of a linear layer, in which * matches anything. Each expert of
    language.experts has adapters of its own. The default leaves the vision tower unchanged."""

    @property
    def adapts_tower(self) -> bool:
        """Return True if adapters are put on the vision tower or its mergers."""
        in_tower = any(target.startswith(("vision.", VISION)) for target in self.targets)
        return self.rank > 0 and in_tower

    def check(self) -> None:
        if self.rank == 0:
            return
        if not self.targets:
            raise ValueError(
                f"lora.targets=[] leaves nothing to train with lora.rank={self.rank}: "
                f"choose from {', '.join(COMPONENTS)}, or set lora.rank=0"
            )
        for target in self.targets:
            if target not in COMPONENTS and not target.startswith((LANGUAGE, VISION)):
                # The same leaf name can be in the language model and in the tower.
                raise ValueError(
                    f"lora.targets holds {target!r}: choose from {', '.join(COMPONENTS)}, or give "
                    f"a full path such as {LANGUAGE}decoder.layers.*.self_attention.linear_qkv"
                )
