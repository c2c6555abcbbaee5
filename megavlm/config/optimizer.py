"""The `optimizer` section: AdamW, its learning-rate schedule, and megatron-core's options."""

import difflib
from dataclasses import dataclass, field
from typing import Any, Literal

from megavlm.config.section import Section, bounded, follows

MOST_BETA_IN_BF16 = 0.99  # an update of 1 % is 2.5 rounding steps of bfloat16

# Options of megatron-core that a recipe may set, and their values without it. Its other options are
# set from other keys, have no effect here, or do not go with megavlm's buffers and checkpoints.
MEGATRON_DEFAULTS: dict[str, bool | float | str] = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "grad_reduce_in_fp32": True,
    "use_precision_aware_optimizer": False,
    "exp_avg_dtype": "float32",
    "exp_avg_sq_dtype": "float32",
}
# Options without effect unless another one is true.
_NEEDED = {
    "overlap_param_gather": "overlap_grad_reduce",
    "exp_avg_dtype": "use_precision_aware_optimizer",
    "exp_avg_sq_dtype": "use_precision_aware_optimizer",
}


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

    weight_decay: float = bounded(0.01, least=0)
    """Decoupled weight decay of matrices; it is not applied to biases and norms."""

    clip_grad: float = bounded(1.0, least=0)
    """Maximum norm of the gradient over all weights; a larger gradient is scaled down to it. 0
    turns clipping off."""

    offload: bool = False
    """Keep the optimizer's state in pinned host memory except during its step, so that activations
    can use the GPU memory. The state crosses PCIe twice in each update. It cannot be combined with
    `rollout.colocate`, which moves the state, too."""

    megatron: dict[str, Any] = field(default_factory=dict)
    """Options of megatron-core by its own names, such as {overlap_grad_reduce: true}: adam_beta1
    (0.9), adam_beta2 (0.95, which forgets old gradients sooner than 0.999, as is usual for language
    models, arXiv 2005.14165), adam_eps (1e-8), overlap_grad_reduce, overlap_param_gather,
    grad_reduce_in_fp32 (true), use_precision_aware_optimizer, exp_avg_dtype and exp_avg_sq_dtype
    (float32). The page on layouts says what they save."""

    @property
    def megatron_options(self) -> dict[str, Any]:
        """All of megatron-core's options that a recipe may set, with their values."""
        return MEGATRON_DEFAULTS | self.megatron

    def check(self) -> None:
        if self.min_lr > self.lr:
            raise ValueError(
                f"optimizer.min_lr={self.min_lr} is above optimizer.lr={self.lr}: "
                "lower it or raise the other"
            )
        for name, value in self.megatron.items():
            _check_option(name, value)
        options = self.megatron_options
        for name, needed in _NEEDED.items():
            if options[name] != MEGATRON_DEFAULTS[name] and not options[needed]:
                raise ValueError(
                    f"optimizer.megatron.{name} has no effect without {needed}: set "
                    f"optimizer.megatron.{needed}=true, or remove it"
                )
        beta = options["adam_beta2"]
        if options["exp_avg_sq_dtype"] == "bfloat16" and beta > MOST_BETA_IN_BF16:
            raise ValueError(
                f"optimizer.megatron.adam_beta2={beta} changes the second moment by less than "
                "optimizer.megatron.exp_avg_sq_dtype=bfloat16 rounds off: set it to "
                f"{MOST_BETA_IN_BF16} or less, or the other to float32"
            )


def _check_option(name: str, value: Any) -> None:
    """Raise ValueError for an option of megatron-core that a recipe cannot set to this value."""
    if name not in MEGATRON_DEFAULTS:
        near = difflib.get_close_matches(name, MEGATRON_DEFAULTS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"optimizer.megatron.{name} is not an option of megatron-core that recipes set: {hint}"
            f"they are {', '.join(MEGATRON_DEFAULTS)}"
        )
    kind = type(MEGATRON_DEFAULTS[name])
    if kind is str:
        holds, words = value in ("float32", "bfloat16"), "float32 or bfloat16"
    elif kind is bool:
        holds, words = isinstance(value, bool), "true or false"
    else:
        holds, words = isinstance(value, float) and 0 < value < 1, "a number between 0 and 1"
    if not holds:
        raise ValueError(f"optimizer.megatron.{name}={value} is out of range: set it to {words}")
