"""Routed experts of tokens in SGLang's answers: the experts that each token was sent to, in every
layer.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megavlm.families import family, language_values

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RoutedExpertsShape:
    """Sizes of a token's routed experts."""

    num_layers: int
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> npt.DTypeLike:
        """Smallest type that holds an expert's number, and that torch has all operations for."""
        return np.uint8 if self.num_experts <= 256 else np.int16

    def decode(self, text: str) -> Array:
        """Return the routed experts [T, layers, top-k] in SGLang's base64 of int32, or in that of
        narrower numbers (server_support/megavlm_routed_experts.py). Raises ValueError for other
        sizes, and for an expert that the model does not have.
        """
        content = base64.b64decode(text)
        start = len(content) % 2  # narrower numbers follow a byte with their size
        values = np.frombuffer(content, f"<u{content[0] if start else 4}", offset=start)
        routed_experts = values.reshape(-1, self.num_layers, self.top_k)
        if routed_experts.size and routed_experts.max() >= self.num_experts:
            raise ValueError(f"a token has experts beyond the {self.num_experts} of the model")
        return routed_experts


def routed_experts_shape(folder: str | Path) -> RoutedExpertsShape | None:
    """Return the sizes of the routed experts in the model of `folder`, None if it has no
    experts.
    """
    values: Mapping[str, Any] = json.loads((Path(folder) / "config.json").read_bytes())
    text = language_values(values)
    sizes = family(values["model_type"]).language_sizes(text)
    if "num_moe_experts" not in sizes:
        return None
    return RoutedExpertsShape(
        sizes["num_layers"], sizes["num_moe_experts"], text["num_experts_per_tok"]
    )
