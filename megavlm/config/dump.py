"""The resolved configuration as YAML: every key, the defaults included. It loads as a recipe.

Above a run's own stands, as a comment, which code resolved it and runs: a model card tells it.
"""

import os
from pathlib import Path

from omegaconf import OmegaConf

from megavlm.config.code_version import code_version
from megavlm.config.schema import Config

_CODE = "# By "


def to_yaml(config: Config) -> str:
    """Without `${...}` and bases; sections and keys in the order of the dataclasses."""
    return OmegaConf.to_yaml(OmegaConf.create(config.to_dict()))


def write(config: Config, folder: str | Path) -> None:
    """config.yaml in `folder`, which is made; a reader never sees half of it."""
    path = Path(folder, "config.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(f"{_CODE}{code_version()}\n{to_yaml(config)}", encoding="utf-8")
    partial.replace(path)


def code_of(text: str) -> str | None:
    """What the text of a run's config.yaml says of the code that ran; None where it says nothing.

    A run that was stopped and went on has that of its last start.
    """
    line, _, _ = text.partition("\n")
    return line.removeprefix(_CODE) if line.startswith(_CODE) else None
