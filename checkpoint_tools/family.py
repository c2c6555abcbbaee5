"""What an HF folder's config.json says about its tensors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from megavlm.models.common.mapping import Entry
from megavlm.models.registry import family

# Of which there must be some, wherever a configuration has them.
_COUNTS = {
    "head_dim", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
    "num_heads", "num_hidden_layers", "num_key_value_heads", "spatial_merge_size", "vocab_size",
}  # fmt: skip


def read_config(folder: Path) -> Any:
    """transformers' configuration of an HF folder; ValueError where it is of no family of ours."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
        model_type = values["model_type"]
    except OSError as error:
        raise ValueError(
            f"{folder} is no HuggingFace model folder: {error.strerror}: {path}."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a model's configuration: {error!r}.") from error
    try:
        family(model_type)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    _check(path, values)
    try:
        return AutoConfig.from_pretrained(folder)
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {error.__cause__ or error}.") from error


def dtype_keys(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a config.json, or its section of a part of the model, names a dtype."""
    for section in _sections(values):
        for key in ("dtype", "torch_dtype"):
            if section.get(key) is not None:
                yield section, key


def _sections(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [values, *(value for value in values.values() if isinstance(value, dict))]


def _check(path: Path, values: dict[str, Any]) -> None:
    """What transformers divides by, or looks up, before it checks it."""
    for section in _sections(values):
        for key in _COUNTS & section.keys():
            count = section[key]
            if isinstance(count, int) and count < 1:
                raise ValueError(f"{path} has {key}={count}: it must be at least 1.")
    for section, key in dtype_keys(values):
        name = section[key]
        if not isinstance(name, str) or not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{path} has {key}={name!r}, which is no dtype of torch.")


def read_mapping(folder: Path) -> list[Entry]:
    """The mapping of the model in an HF folder; ValueError as in read_config."""
    config = read_config(folder)
    return family(config.model_type).mapping(config)
