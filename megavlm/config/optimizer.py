"""The `optimizer` section: AdamW and its learning-rate schedule."""

from dataclasses import dataclass
from typing import Literal

from megavlm.config.section import Section, bounded, follows


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """AdamW (arXiv 1711.05101) and the schedule of its learning rate, in steps of the run."""

    lr: float = bounded(1e-6, above=0)
    """Learning rate after warmup. 1e-6 is usual for policy optimisation of all weights; adapters
    and SFT take 1e-5 to 1e-4."""

    min_lr: float = bounded(0.0, least=0)
    """Learning rate at the end of a linear or cosine schedule."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate from `optimizer.lr` to `optimizer.min_lr` after warmup; constant
    stays at `optimizer.lr`."""

    warmup_steps: int = follows(0, least=0)
    """Steps over which the learning rate rises linearly from 0. Null takes an eighth of the steps
    in which the model learns, at most 20."""

    betas: tuple[float, float] = bounded((0.9, 0.95), least=0, below=1)
    """Decay rates of the first and second moment. 0.95 in place of 0.999 forgets old gradients
    sooner, as is usual for language models (arXiv 2005.14165)."""

    eps: float = bounded(1e-8, above=0)
    """Term added to the denominator of an update."""

    weight_decay: float = bounded(0.01, least=0)
    """Decoupled weight decay of matrices; biases and norms have none."""

    clip_grad: float = bounded(1.0, least=0)
    """Largest norm of the gradient over all weights; larger ones are scaled down. 0 turns clipping
    off."""

    def check(self) -> None:
        if self.min_lr > self.lr:
            raise ValueError(
                f"optimizer.min_lr={self.min_lr} is above optimizer.lr={self.lr}: "
                "lower it or raise the other"
            )
