"""The resolved configuration as YAML: every key, the defaults included. It loads as a recipe."""

import os
from pathlib import Path

from omegaconf import OmegaConf

from megavlm.config.schema import Config


def to_yaml(config: Config) -> str:
    """Without `${...}` and bases; sections and keys in the order of the dataclasses."""
    return OmegaConf.to_yaml(OmegaConf.create(config.to_dict()))


def write(config: Config, folder: str | Path) -> None:
    """config.yaml in `folder`, which is made; a reader never sees half of it."""
    path = Path(folder, "config.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(to_yaml(config), encoding="utf-8")
    partial.replace(path)
