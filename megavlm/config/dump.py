"""The resolved configuration as YAML, with every key: it loads as a recipe.

A run's own has a first line that names the code that ran; model cards repeat it.
"""

import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

from omegaconf import OmegaConf

from megavlm.config.schema import Config

_CODE = "# By "
_ROOT = Path(__file__).parents[2]


def to_yaml(config: Config) -> str:
    """Return YAML without `${...}` and bases; sections and keys in the order of the dataclasses."""
    return OmegaConf.to_yaml(OmegaConf.create(config.to_dict()))


def write(config: Config, folder: str | Path) -> None:
    """Write `folder`/config.yaml atomically; the folder is made."""
    path = Path(folder, "config.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(f"{_CODE}{code_version()}\n{to_yaml(config)}", encoding="utf-8")
    partial.replace(path)


def code_of(text: str) -> str | None:
    """Return the code version that a run's config.yaml names, None if it names none.

    For a run that was resumed it is that of the last start.
    """
    line, _, _ = text.partition("\n")
    return line.removeprefix(_CODE) if line.startswith(_CODE) else None


def code_version() -> str:
    """Return `megavlm 0.1.0`, in a git checkout with the commit and `-dirty` if files differ."""
    commit, git = "", shutil.which("git")
    if git and (_ROOT / ".git").exists():
        command = [git, "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
        command += ["--exclude", "*"]  # tags
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f"megavlm {version('megavlm')}" + (f", commit {commit}" if commit else "")
