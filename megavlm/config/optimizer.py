"""The `optimizer` section: AdamW and its learning-rate schedule."""

from dataclasses import dataclass
from typing import Literal

from megavlm.config.section import Section, bounded, follows

MOST_BETA_IN_BF16 = 0.99  # an update of 1 % is 2.5 rounding steps of bfloat16


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """AdamW (arXiv 1711.05101) and the schedule of its learning rate, in steps of the run."""

    lr: float = bounded(1e-6, above=0)
    """Learning rate after warmup. 1e-6 is usual for policy optimisation of all weights, and 1e-5 to
    1e-4 for adapters and SFT."""

    min_lr: float = bounded(0.0, least=0)
    """Learning rate at the end of a linear or cosine schedule."""

    tower_lr: float | None = bounded(None, above=0)
    """Learning rate of the vision tower's weights or adapters, without its merger, on the same
    schedule; null uses `optimizer.lr`. A tower that learns with the language model usually takes a
    rate 2 to 10 times smaller. It needs a tower that is trained (`model.freeze_tower: false`, or
    adapters in it)."""

    merger_lr: float | None = bounded(None, above=0)
    """Learning rate of the merger, which maps the tower's features to the language model, like
    `optimizer.tower_lr`; null uses `optimizer.lr`."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate from `optimizer.lr` to `optimizer.min_lr` after warmup; constant
    stays at `optimizer.lr`."""

    warmup_steps: int = follows(0, least=0)
    """Steps over which the learning rate rises linearly from 0. Null uses an eighth of the steps in
    which the model is trained, at most 20."""

    betas: tuple[float, float] = bounded((0.9, 0.95), least=0, below=1)
    """Decay rates of the first and second moment. 0.95 instead of 0.999 forgets old gradients
    sooner, as is usual for language models (arXiv 2005.14165)."""

    eps: float = bounded(1e-8, above=0)
    """Term added to the denominator of an update."""

    weight_decay: float = bounded(0.01, least=0)
    """Decoupled weight decay of matrices; it is not applied to biases and norms."""

    clip_grad: float = bounded(1.0, least=0)
    """Maximum norm of the gradient over all weights; a larger gradient is scaled down to it. 0
    turns clipping off."""

    overlap_grad_reduce: bool = False
    """Reduce gradients over the data and context axes bucket by bucket during the last backward
    pass of an update, instead of all at once after it. Gradients of a trained tower are always
    reduced after it, because some packs do not use the tower."""

    overlap_param_gather: bool = False
    """Gather updated parameters over the data and context axes during the next forward pass, in
    which each layer waits for its own parameters. It helps where a forward pass follows an update:
    with several updates in a step, and in SFT. It needs `optimizer.overlap_grad_reduce`."""

    grad_reduce_in_bf16: bool = False
    """Keep and reduce gradients in bfloat16. It halves their memory and traffic, but long sums over
    packs and ranks are less exact than in float32. It needs `model.dtype: bfloat16`."""

    precision_aware: bool = False
    """Use megatron-core's precision-aware optimizer. It stores only the 16 bits of each fp32 main
    weight that the bfloat16 weight lacks, and reads gradients as they were reduced, without a copy
    in float32. The updates are the same, with 10 bytes of optimizer state per parameter instead of
    12, and fewer with the next two keys. It needs Transformer Engine and
    `model.dtype: bfloat16`."""

    exp_avg_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of Adam's first moment between updates; updates are computed in float32. bfloat16
    rounds the moment to 8 bits and takes 2 bytes instead of 4. It needs
    `optimizer.precision_aware`."""

    exp_avg_sq_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of Adam's second moment between updates, like `optimizer.exp_avg_dtype`. With
    bfloat16 the second entry of `optimizer.betas` must be at most 0.99: above, the change by an
    update is smaller than the rounding, so that the moment would never change."""

    offload: bool = False
    """Keep the optimizer's state in pinned host memory except during its step, so that activations
    can use the GPU memory. The state crosses PCIe twice in each update. It cannot be combined with
    `rollout.colocate`, which moves the state, too."""

    def check(self) -> None:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError(
                "optimizer.overlap_param_gather=true is for runs that overlap gradients too: set "
                "optimizer.overlap_grad_reduce=true or optimizer.overlap_param_gather=false"
            )
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) != "float32" and not self.precision_aware:
                raise ValueError(
                    f"optimizer.{name}={getattr(self, name)} is for the precision-aware optimizer: "
                    f"set optimizer.precision_aware=true or optimizer.{name}=float32"
                )
        if self.exp_avg_sq_dtype == "bfloat16" and self.betas[1] > MOST_BETA_IN_BF16:
            raise ValueError(
                f"optimizer.betas={list(self.betas)} changes the second moment by less than "
                "optimizer.exp_avg_sq_dtype=bfloat16 rounds off: set its second entry to "
                f"{MOST_BETA_IN_BF16} or less, or optimizer.exp_avg_sq_dtype=float32"
            )
        if self.min_lr > self.lr:
            raise ValueError(
                f"optimizer.min_lr={self.min_lr} is above optimizer.lr={self.lr}: "
                "lower it or raise the other"
            )
