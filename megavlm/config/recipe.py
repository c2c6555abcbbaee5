"""Recipe files: YAML with bases, and dotted overrides, as untyped trees.

    base: [common.yaml]          # relative to this file; later bases win, this file wins over them
    optimizer: {lr: 1e-6}        # a section of schema.py's Config

A file that gives a reward, environment or algorithm another name starts with no options of the old
one. Not covered: lists are replaced, never appended to.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megavlm.config.algorithm import ALGORITHMS


def read_recipe(
    path: Path, inside: tuple[Path, ...] = (), files: dict[str, Path] | None = None
) -> DictConfig:
    """Read a recipe file and merge it over its bases.

    inside: The chain of files that name this file as a base, to detect cycles. files: Filled with
    the file that sets each key, as section.key or section.key.option.
    """
    named = f" (a base of {inside[-1]})" if inside else ""
    try:
        path = path.resolve()
    except ValueError as error:  # a null byte in it
        raise ValueError(f"{str(path)!r}{named} is not the path of a recipe: {error}") from error
    if path in inside:
        raise ValueError(f"{path} is a base of itself (through {inside[-1]}): remove one of them")
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the recipe {path}{named} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the recipe {path}{named} is not YAML: {error}") from error
    except ValueError as error:
        raise ValueError(f"the recipe {path}{named} {error}") from error
    given = content.pop("base", None)
    bases = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(bases, list | ListConfig) or not all(isinstance(x, str) for x in bases):
        raise ValueError(
            f"base={given} in {path} must be a file, or a list of files: base: common.yaml"
        )
    merged = OmegaConf.create()
    for base in bases:
        merged = merge(merged, read_recipe(path.parent / base, (*inside, path), files))
    if files is not None:
        files |= dict.fromkeys(_paths(content), path)
    return merge(merged, content)


def merge(below: DictConfig, *above: DictConfig) -> DictConfig:
    """Merge recipes; later ones win. Where the last one's section has another name than the first
    one's, keys of the first that belong to its name are left out.
    """
    merged = OmegaConf.merge(*above)
    assert isinstance(merged, DictConfig)
    kept = deepcopy(below)
    for section in ("environment", "reward", "algorithm"):
        for key in _keys_of_name(section, below, merged):
            kept[section].pop(key, None)
    whole = OmegaConf.merge(kept, merged)
    assert isinstance(whole, DictConfig)
    return whole


def _keys_of_name(section: str, below: DictConfig, above: DictConfig) -> set[str]:
    """Return the keys of a section in `below` that belong to a name which `above` replaces."""
    old, new = below.get(section), above.get(section)
    if not isinstance(old, DictConfig):
        return set()
    if not isinstance(new, DictConfig) or "name" not in new or new.name == old.get("name"):
        return set()
    if section != "algorithm":
        return {"name", "options", "parts"}
    algorithm = ALGORITHMS.get(str(new.name))
    known = set() if algorithm is None else {item.name for item in fields(algorithm)}
    return set() if algorithm is None else {str(key) for key in old} - known


_KEY = re.compile(r"\b[a-z]+(?:\.[\w-]+)+")


def _paths(tree: DictConfig) -> Iterator[str]:
    """Iterate over the keys of all depths, as section.key.option."""

    def walk(values: Mapping[Any, Any], prefix: str) -> Iterator[str]:
        for key, value in values.items():
            yield f"{prefix}{key}"
            if isinstance(value, Mapping):
                yield from walk(value, f"{prefix}{key}.")

    content = OmegaConf.to_container(tree)
    assert isinstance(content, dict)
    return walk(content, "")


def _known(key: str, files: Mapping[str, Path]) -> str | None:
    """Return the longest beginning of a key that a file sets, None if it is a section or less."""
    while "." in key:
        if key in files:
            return key
        key = key.rpartition(".")[0]
    return None


@contextmanager
def naming_files(recipe: Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Add to a ValueError which base of the recipe sets a key that the error names."""
    try:
        yield
    except ValueError as error:
        files: dict[str, Path] = {}
        read_recipe(recipe, files=files)
        own = {key for key, file in files.items() if file == recipe.resolve()}
        own |= {key for override in overrides for key in _paths(parse_override(override))}
        named = dict.fromkeys(_known(key, files) for key in _KEY.findall(str(error)))
        notes = [
            f"{key} is set in {os.path.relpath(files[key])}"
            for key in named
            if key is not None and key not in own
        ]
        if not notes:
            raise
        raise ValueError(f"{error} ({'; '.join(notes)})") from error


def parse_override(text: str) -> DictConfig:
    """Parse `section.key=value` as a tree; the value is YAML: null, [a, b], 1e-6."""
    key, equals, _ = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", key):
        raise ValueError(f"{text!r} is not an override: write section.key=value")
    try:
        return OmegaConf.from_dotlist([text])
    except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
        raise ValueError(f"the value of {text!r:.200} is not YAML: {one_line(error)}") from error


def parse_yaml(text: str) -> DictConfig:
    """Parse the text of a YAML file as a tree of sections. Raises ValueError for anything else; the
    message completes a sentence that starts with the name of the file.
    """
    try:
        content = OmegaConf.create(text or "{}")
    except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
        raise ValueError(f"is not YAML: {one_line(error)}") from error
    except AssertionError:  # the text is only a number
        content = None
    if not isinstance(content, DictConfig):
        raise ValueError("must be sections of keys, not a list, text or number")
    return content


def one_line(error: Exception) -> str:
    """Return the message without the lines in which OmegaConf names its own objects."""
    return " ".join(str(error).split("full_key:")[0].split())
