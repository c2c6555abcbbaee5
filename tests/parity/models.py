"""The tiny models of the parity matrix."""

from pathlib import Path
from typing import Any

from megavlm.demo.tiny_model import make_tiny_model
from tests.parity.inputs import QUESTION

# Four layers for four stages, four key-value heads for four tensor ranks; three DeepStack levels,
# so that with a layer per stage every stage but the last adds one.
SIZES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {},
    "qwen2_5_vl": {"full_attention_blocks": [1]},
    "qwen3_vl": {"deepstack_blocks": [0, 1, 3], "head_dim": 24},
    "qwen3_vl_moe": {"deepstack_blocks": [0, 1, 3], "num_experts": 8, "dense_layers": [1]},
}


def make_model(folder: Path, family: str, tied: bool) -> None:
    """Norms and biases drawn at random too, and weights large enough to matter."""
    make_tiny_model(
        folder,
        [QUESTION] * 10,
        seed=3,
        family=family,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        vision_depth=4,
        tied_embeddings=tied,
        init_std=0.05,
        randomise_norms_and_biases=True,
        **SIZES[family],
    )
