"""The `model` section: the model to train and which of its parts are trained."""

from dataclasses import dataclass
from typing import Literal

from megavlm.config.section import MISSING, Section, bounded

HALF_PRECISION = ("flash", "transformer_engine")  # attention kernels without float32


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """The model to train, its precision and its frozen parts."""

    folder: str = MISSING
    """HuggingFace folder of the model: architecture, tokenizer, image processor and, unless
    `model.checkpoint` is set, weights as safetensors. Required."""

    checkpoint: str | None = None
    """Megatron checkpoint whose weights training starts from, saved with any parallel layout: a
    folder of steps, or one step's folder. Null loads the weights in `model.folder`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of parameters and activations, on the trainer and on managed rollout servers.
    Optimizer states are float32 with either type. The default is exact on CPUs; GPU recipes use
    bfloat16."""

    attention: Literal["auto", "sdpa", "flash", "flex", "transformer_engine"] = "auto"
    """Kernel of the language model's core attention. `sdpa` is PyTorch's scaled dot product
    attention with a mask for each tree, `flash` is PyTorch's variable-length flash attention,
    `flex` is PyTorch's FlexAttention, and `transformer_engine` is NVIDIA's kernel. `auto` uses
    flash for bfloat16 on a GPU and sdpa otherwise. flash and transformer_engine compute in half
    precision only."""

    fusions: bool = True
    """Use fused kernels on a GPU: compute SwiGLU as one kernel and, where Transformer Engine is
    installed, the rotary embedding, accumulate weight gradients into their buffer within the matrix
    product, and permute the tokens of experts with its kernels. The rotary embedding is then
    computed in float32. False uses separate PyTorch operations, as on a CPU."""

    freeze_tower: bool = True
    """Keep the weights of the vision tower fixed. Image features then stay the same in every step,
    so that rollout servers may cache them."""

    freeze_merger: bool = True
    """Keep the weights of the mergers fixed, which project the tower's features into the language
    model."""

    features_mb: int = bounded(8192, least=0)
    """MiB of a step's image features that stay on a GPU if the tower is frozen. Further features
    are kept in pinned host memory and copied back for each pack that contains them. The default
    holds the features of 900 images of a megapixel, for a model of hidden size 3584 without
    DeepStack."""

    def check(self) -> None:
        check_attention(self.attention, self.dtype)


def check_attention(attention: str, dtype: str) -> None:
    """Raise ValueError if the kernel `attention` does not compute in `dtype`."""
    if dtype == "float32" and attention in HALF_PRECISION:
        raise ValueError(
            f"model.attention={attention} does not compute in model.dtype=float32: "
            "set model.dtype=bfloat16, or model.attention to sdpa, flex or auto"
        )
