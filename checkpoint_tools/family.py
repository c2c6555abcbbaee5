"""What an HF folder's config.json says about its tensors."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from megavlm.models.common.mapping import Entry
from megavlm.models.registry import family


def read_config(folder: Path) -> Any:
    """transformers' configuration of an HF folder; ValueError where it is of no family of ours."""
    path = folder / "config.json"
    try:
        model_type = json.loads(path.read_bytes())["model_type"]
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
    try:
        return AutoConfig.from_pretrained(folder)
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {error.__cause__ or error}.") from error


def read_mapping(folder: Path) -> list[Entry]:
    """The mapping of the model in an HF folder; ValueError as in read_config."""
    config = read_config(folder)
    return family(config.model_type).mapping(config)
