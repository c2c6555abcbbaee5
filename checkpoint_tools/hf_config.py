"""config.json of a HuggingFace folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from megavlm.families import AUTHORS, PART, check_unquantised, family
from megavlm.model_config import trained_config
from megavlm.models.common.mapping import Entry

# The values of these keys must be at least 1 wherever they appear.
_COUNTS = {
    "head_dim", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
    "num_heads", "num_hidden_layers", "num_key_value_heads", "spatial_merge_size", "vocab_size",
}  # fmt: skip


def read_config(folder: Path) -> Any:
    """Load transformers' configuration of a HuggingFace folder, also of one in the form of the
    model's authors.

    Raises ValueError if it is missing, invalid, or of an unsupported family.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
        model_type = values["model_type"]
    except OSError as error:
        raise ValueError(
            f"{folder} is not a HuggingFace model folder: {error.strerror}: {path}."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a model's configuration: {error!r}.") from error
    is_authors = has_authors_form(folder)
    try:
        parts = family(AUTHORS[model_type] if is_authors else model_type)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    check_unquantised(values, path)
    _check(path, values)
    try:
        if is_authors:
            return AutoConfig.for_model(AUTHORS[model_type], **parts.authors_config(values))
        return trained_config(AutoConfig.from_pretrained(folder))
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {error.__cause__ or error}.") from error
    except KeyError as error:
        raise ValueError(f"{path} has no {error}.") from error


def has_authors_form(folder: Path) -> bool:
    """Return True for a folder in the form of the model's authors (families.AUTHORS)."""
    model_type = json.loads((folder / "config.json").read_bytes()).get("model_type")
    return isinstance(model_type, str) and model_type in AUTHORS


def mapping_of(folder: Path, config: Any, *, draft_head: bool = False) -> list[Entry]:
    """Return an entry for every tensor of a folder's model, by the names in the folder's form.
    config: The result of `read_config`, in which embeddings may be untied. draft_head: True for a
    model whose draft head has been trained.
    """
    parts = family(config.model_type)
    if has_authors_form(folder):
        return parts.authors_mapping(config)
    return parts.mapping(config, draft_head=draft_head)


def dtype_keys(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (section, key) for each place in a config.json that names a dtype."""
    for section in _sections(values):
        for key in ("dtype", "torch_dtype"):
            if section.get(key) is not None:
                yield section, key


def untie(values: dict[str, Any]) -> None:
    """Untie embedding and head in a config.json, on both levels: families differ in which level
    they read.
    """
    model = values.get(PART) or values
    model["tie_word_embeddings"] = False
    text = model.get("text_config") or model.get("llm_config") or {}
    if "tie_word_embeddings" in text:
        text["tie_word_embeddings"] = False


def _sections(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sections of a config.json that describe the trained model, and the whole."""
    model = values.get(PART) or values
    sections = [model, *(value for value in model.values() if isinstance(value, dict))]
    return sections if model is values else [values, *sections]


def _check(path: Path, values: dict[str, Any]) -> None:
    """Check values that transformers divides by or looks up before it validates them."""
    for section in _sections(values):
        for key in _COUNTS & section.keys():
            count = section[key]
            if isinstance(count, int) and count < 1:
                raise ValueError(f"{path} has {key}={count}: it must be at least 1.")
    for section, key in dtype_keys(values):
        name = section[key]
        if not isinstance(name, str) or not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{path} has {key}={name!r}, but torch has no such dtype.")
