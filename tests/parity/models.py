"""The tiny models of the parity matrix."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from megavlm.demo.tiny_model import make_tiny_model
from tests.parity.inputs import QUESTION, inputs_of
from tests.support.cache import cached_folder
from tests.support.families import model_type
from tests.support.fork import launch

# Four layers for four stages, four key-value heads for four tensor ranks; three DeepStack levels,
# so that with a layer per stage every stage but the last adds one.
SIZES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {},
    # A vision MLP whose width is no multiple of 8, as in the released 3B and 7B.
    "qwen2_5_vl": {"full_attention_blocks": [1], "vision_ffn_size": 100},
    "qwen3_vl": {"deepstack_blocks": [0, 1, 3], "head_dim": 24},
    "qwen3_vl_moe": {"deepstack_blocks": [0, 1, 3], "num_experts": 8, "dense_layers": [1]},
    # Well conditioned: under weights as large as the others' rounding moves transformers' own
    # gradients by 1e-5 (RESULTS.md).
    "qwen3_5": {"init_std": 0.02},
    "qwen3_5_moe": {"init_std": 0.03, "num_experts": 8},
    "glm4v": {},
    "glm4v_moe": {"num_experts": 8},
    "internvl": {"position_table_side": 4},
    "internvl_moe": {
        "position_table_side": 4,
        "num_experts": 8,
        "head_dim": 24,
        "dense_layers": [1],
    },
    # As Qwen3.5, whose language model it has.
    "minicpmv4_6": {"init_std": 0.02},
    "qwen3_omni_moe": {"deepstack_blocks": [0, 1, 3], "num_experts": 8, "dense_layers": [1]},
}
# InternVL3.5's dense language models are Qwen3; InternVL3's, without `head_dim`, are Qwen2.
TIED_SIZES: dict[str, dict[str, Any]] = {"internvl": {"head_dim": 24}}


def model_folder(family: str, *, tied: bool = False, bf16: bool = False) -> Path:
    """Return the folder of a family's model, which all tests share; see `make_bf16`.

    Its processor is loaded here, for all ranks that are forked afterwards.
    """

    def make(folder: Path) -> None:
        launch(1, make_model, folder, family, tied)
        if bf16:
            launch(1, make_bf16, folder)

    folder = cached_folder(f"parity-{family}", (tied, bf16), make)
    inputs_of(folder).sequences("mixed")
    return folder


def make_model(folder: Path, family: str, tied: bool) -> None:
    """Norms and biases drawn at random too, and weights large enough to matter."""
    sizes = SIZES[family] | (TIED_SIZES.get(family, {}) if tied else {})
    make_tiny_model(
        folder,
        [QUESTION] * 10,
        seed=3,
        family=model_type(family),
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        vision_depth=4,
        tied_embeddings=tied,
        randomise_norms_and_biases=True,
        **{"init_std": 0.05, **sizes},
    )


def make_bf16(folder: Path) -> None:
    """Round a folder's weights to bf16, with queries four times as large: attention that tells
    positions apart, as that of random weights hardly does.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    has_norm = any(".q_norm." in name for name in tensors)
    for name, tensor in tensors.items():
        if ".attn.qkv." in name:
            tensor[: len(tensor) // 3] *= 4
        elif (".q_norm." if has_norm else ".q_proj.") in name:
            tensor *= 4
    save_file({name: x.bfloat16() for name, x in tensors.items()}, path, {"format": "pt"})
