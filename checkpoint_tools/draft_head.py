"""Folders of EAGLE-3 draft heads: new ones with random weights, and trained ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_tools.hf_config import read_config
from checkpoint_tools.output_folder import output_folder
from megavlm.families import family
from megavlm.models.common.eagle3 import head_values

FOLDER = "draft_head"  # of a trained head, in the folder of an exported model


def make_draft_head(model_dir: Path, head_dir: Path, *, seed: int, force: bool = False) -> int:
    """Write a new head for a model, with random weights in the model's dtype. Returns its number of
    parameters.

    Raises ValueError for a model that has no EAGLE-3 head, or as `output_folder` does.
    """
    config = read_config(model_dir)
    parts = family(config.model_type)
    if parts.draft_head != "eagle3":
        raise ValueError(
            f"{model_dir} is a model of {config.model_type}, but EAGLE-3 draft heads are trained "
            "only for Qwen2.5-VL and Qwen3-VL: give a folder of one of them."
        )
    text = config.text_config
    dtype = config.dtype or text.dtype or torch.bfloat16
    generator = torch.Generator().manual_seed(seed)
    tensors = dict[str, Tensor]()
    for entry in parts.draft_mapping(config):
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True):
            if len(shape) == 1:
                tensors[name] = torch.ones(shape, dtype=dtype)
            else:
                drawn = text.initializer_range * torch.randn(shape, generator=generator)
                tensors[name] = drawn.to(dtype)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with output_folder(
        head_dir, sources=(model_dir,), force=force, mark="config.json", nbytes=nbytes
    ) as output:
        write_head(output, text, tensors)
    return sum(tensor.numel() for tensor in tensors.values())


def write_head(folder: Path, text: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write a head's config.json and weights to an existing folder. text: transformers' text_config
    of its model. tensors: All of the head, by their names in the mapping.
    """
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    values = head_values(text.to_dict()) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    held = {name.removeprefix("mtp."): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
