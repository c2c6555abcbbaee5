"""The resolved configuration as YAML, with every key. It can be loaded as a recipe.

The config.yaml of a run starts with a line that names the code version; model cards repeat it.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megavlm import __version__
from megavlm.config.recipe import one_line, parse_yaml
from megavlm.config.schema import Config
from megavlm.writing import write_whole

_CODE = "# By "
_ROOT = Path(__file__).parents[2]


def to_yaml(config: Config) -> str:
    """Return YAML without `${...}` and bases; sections and keys are in the dataclasses' order."""
    return OmegaConf.to_yaml(OmegaConf.create(config.to_dict()))


def write(config: Config, folder: str | Path) -> None:
    """Write `folder`/config.yaml atomically, and create the folder."""
    path = Path(folder, "config.yaml")
    write_whole(path, f"{_CODE}{code_version()}\n{to_yaml(config)}".encode())


def changes(config: Config, folder: str | Path) -> list[str]:
    """Return the keys whose values differ from `folder`/config.yaml, each as
    `section.key=value (was value)`. Returns [] if the file does not exist, and one entry that says
    that the changes are unknown if the file is damaged.
    """
    path = Path(folder, "config.yaml")
    if not path.is_file():
        return []
    try:
        recorded = parse_yaml(path.read_text(encoding="utf-8"))
        if not recorded:  # a power loss may leave an empty file
            raise ValueError("it is empty")
        before, now = (
            dict(_values("", OmegaConf.to_container(tree)))
            for tree in (recorded, parse_yaml(to_yaml(config)))
        )
    except ValueError as error:
        return [f"unknown, as {path} is damaged ({one_line(error)})"]
    none = "absent"
    return [
        f"{key}={now.get(key, none)} (was {before.get(key, none)})"
        for key in now | before
        if now.get(key, none) != before.get(key, none)
    ]


def _values(name: str, section: Any) -> Iterator[tuple[str, str]]:
    """Yield the values of a section by their dotted names."""
    if isinstance(section, dict) and section:
        for key, part in section.items():
            yield from _values(f"{name}.{key}".removeprefix("."), part)
    else:
        yield name, json.dumps(section, ensure_ascii=False)


def code_of(text: str) -> str | None:
    """Return the code version that the text of a run's config.yaml names, or None.

    A run that was resumed names the version of its last start.
    """
    line, _, _ = text.partition("\n")
    return line.removeprefix(_CODE) if line.startswith(_CODE) else None


def code_version() -> str:
    """Return the version, as `megavlm 0.1.0`. A git checkout adds its commit, and `-dirty` if
    files differ from it.
    """
    commit, git = "", shutil.which("git")
    if git and (_ROOT / ".git").exists():
        command = [git, "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
        command += ["--exclude", "*"]  # tags
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f"megavlm {__version__}" + (f", commit {commit}" if commit else "")
