"""SGLang's own quantiser of block FP8, and hub files made with it."""

import ast
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

QUANTISED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUANTISED += ("in_proj_qkv", "in_proj_z", "out_proj")


@cache
def quantiser() -> Callable[[Tensor, list[int]], tuple[Tensor, Tensor]]:
    """Return `quant_weight_ue8m0` of the installed SGLang. Importing its module takes long."""
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0], "srt")
    found: dict[str, Any] = {"torch": torch}
    needed = ("ceil_align", "ceil_div", "ceil_to_ue8m0", "per_block_cast_to_fp8")
    for file in ("utils/common.py", "layers/quantization/fp8_utils.py"):
        tree = ast.parse((folder / file).read_text())
        tree.body = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name in (*needed, "quant_weight_ue8m0")
        ]
        source = ast.unparse(tree)
        exec("from __future__ import annotations\n" + source, found)  # noqa: S102
    return found["quant_weight_ue8m0"]


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers and the scales of a weight, as SGLang computes them. Of a stack whose rows
    are no whole blocks, it takes one after the other.
    """
    if weight.dim() == 3 and weight.shape[1] % 128:
        numbers, factors = zip(*map(quantise, weight), strict=True)
        return torch.stack(numbers), torch.stack(factors)
    return quantiser()(weight.bfloat16().contiguous(), [128, 128])


def quantised_files(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return hub tensors, with experts one by one, in the form of released models in block FP8."""
    files = {}
    for name, tensor in tensors.items():
        is_language = ".visual." not in name and ".layers." in name
        if is_language and name.endswith(tuple(f".{leaf}.weight" for leaf in QUANTISED)):
            files[name], files[f"{name}_scale_inv"] = quantise(tensor)
        else:
            files[name] = tensor if name.endswith(".A_log") else tensor.bfloat16()
    return files
