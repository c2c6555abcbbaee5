"""transformers' configuration of the trained model in a folder."""

from pathlib import Path
from typing import Any

from megavlm.families import PART


def model_config(folder: str | Path) -> Any:
    """Return transformers' configuration of the trained model in a folder, with the folder's
    model_type. Raises as AutoConfig.from_pretrained does.
    """
    from transformers import AutoConfig

    return trained_config(AutoConfig.from_pretrained(folder, local_files_only=True))


def trained_config(hf_config: Any) -> Any:
    """Return the trained model's part of transformers' configuration of a folder, with the folder's
    model_type.
    """
    part = getattr(hf_config, PART, None)
    if part is None:
        return hf_config
    part.model_type = hf_config.model_type
    return part
