"""What an HF folder's config.json says about its tensors."""

import json
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from megavlm.models.common.mapping import Entry
from megavlm.models.registry import family


def read_mapping(folder: Path) -> list[Entry]:
    """The mapping of the model in an HF folder; ValueError where it is of no family of ours."""
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
        mapping = family(model_type).mapping
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        return mapping(AutoConfig.from_pretrained(folder))
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {error.__cause__ or error}.") from error
