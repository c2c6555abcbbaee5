"""Recipe files: YAML with bases, and dotted overrides, as untyped trees.

    base: [common.yaml]          # relative to this file; later bases win, this file wins over them
    optimizer: {lr: 1e-6}        # a section of schema.py's Config

Not covered: lists are replaced, never appended to.
"""

import re
from pathlib import Path

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def read_recipe(path: Path, inside: tuple[Path, ...] = ()) -> DictConfig:
    """Read a recipe file and merge it over its bases.

    inside: The chain of files that name this file as a base, to detect cycles.
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
    parents = [read_recipe(path.parent / base, (*inside, path)) for base in bases]
    merged = OmegaConf.merge(*parents, content)
    assert isinstance(merged, DictConfig)
    return merged


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
