"""Load a recipe with overrides as a complete, typed and checked configuration."""

import dataclasses
import difflib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megavlm.config.algorithm import ALGORITHMS, Algorithm
from megavlm.config.cross_rules import check, check_ranges, derive
from megavlm.config.recipe import merge, naming_files, one_line, parse_override, read_recipe
from megavlm.config.schema import Config
from megavlm.config.section import MISSING

SECTIONS: dict[str, Any] = get_type_hints(Config)

# Keys of earlier releases. They are read until the next release, with a warning.
RENAMED: dict[str, str] = {
    "rollout.overlap": "rollout.streaming",
    "rollout.pause": "rollout.pause_mode",
    "rollout.timed_out": "rollout.on_timeout",
    "rollout.patience": "rollout.health_check_timeout",
}

logger = logging.getLogger(__name__)
# Keys of earlier recipes, and what to write in their place.
MOVED = {
    "distillation.urls": "distillation.teachers.NAME.urls",
    "optimizer.betas": "optimizer.megatron.adam_beta1 and adam_beta2",
    "optimizer.eps": "optimizer.megatron.adam_eps",
    "optimizer.grad_reduce_in_bf16": "optimizer.megatron.grad_reduce_in_fp32=false",
    "optimizer.precision_aware": "optimizer.megatron.use_precision_aware_optimizer",
    **{
        f"optimizer.{name}": f"optimizer.megatron.{name}"
        for name in (
            "overlap_grad_reduce", "overlap_param_gather", "exp_avg_dtype", "exp_avg_sq_dtype"
        )
    },
}  # fmt: skip


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the recipe at `path` with its bases and `key=value` overrides.

    Raises ValueError, in one sentence, for an unreadable file, an unknown key (with the nearest
    known one), a value of the wrong type, or a broken rule.
    """
    raw = read_recipe(Path(path))
    if overrides:
        raw = merge(raw, *map(parse_override, overrides))
    with naming_files(Path(path), overrides):
        return build(raw)


def build(raw: DictConfig | Mapping[str, Any]) -> Config:
    """Build the configuration from a tree of sections. Raises ValueError as `load` does."""
    raw = OmegaConf.create(dict(raw)) if not isinstance(raw, DictConfig) else raw
    given = _renamed(_plain(raw, resolve=False))
    classes = {**SECTIONS, "algorithm": _algorithm(given.get("algorithm"))}
    _check_known("", given, classes)
    for name, values in given.items():
        if not isinstance(values, dict):
            raise ValueError(
                f"{name}={_shown(values)} is not a section: write its keys below it, "
                f"for example {name}.{_keys(classes[name])[0]}=VALUE"
            )
        _check_known(name, values, classes)
    tree = {name: {**_defaults(cls), **given.get(name, {})} for name, cls in classes.items()}
    # A tree of every key takes longer to make than all else here.
    values = _plain(OmegaConf.create(tree), resolve=True) if "${" in str(given) else tree
    following = {
        f"{name}.{key}"
        for name, cls in classes.items()
        for key in _following(cls)
        if values[name][key] is None
    }
    sections = {
        name: _section(
            name, cls, {k: v for k, v in values[name].items() if f"{name}.{k}" not in following}
        )
        for name, cls in classes.items()
    }
    config = Config(**sections)
    check_ranges(config)
    config = derive(config, following)
    check(config)
    return config


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """Return the sections with keys of earlier releases under their new names. Warns of each."""
    sections = {
        name: dict(values) if isinstance(values, dict) else values for name, values in given.items()
    }
    for old, new in RENAMED.items():
        (section, before), key = old.split("."), new.partition(".")[2]
        values = sections.get(section)
        if not isinstance(values, dict) or before not in values:
            continue
        if key in values:
            raise ValueError(f"{old} is the old name of {new}, and both are set: remove {old}")
        values[key] = values.pop(before)
        logger.warning("%s is now %s: the old name is read until the next release", old, new)
    return sections


def recipe_keys() -> list[str]:
    """Return the keys of a recipe as `section.key`, with those of every algorithm."""
    classes = {name: [cls] for name, cls in SECTIONS.items()}
    classes["algorithm"] = list(ALGORITHMS.values())
    return sorted(
        {f"{name}.{key}" for name, kinds in classes.items() for cls in kinds for key in _keys(cls)}
    )


def _algorithm(values: Any) -> type[Algorithm]:
    name = str(values.get("name", "grpo")) if isinstance(values, dict) else "grpo"
    if name not in ALGORITHMS:
        raise ValueError(
            f"algorithm.name={name!r} is unknown: choose one of {', '.join(ALGORITHMS)}"
        )
    return ALGORITHMS[name]


def _check_known(section: str, given: Iterable[Any], classes: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown key. The message names the most similar key, from the same
    section if possible, else from any section. The section "" is the top level.
    """
    known = _keys(classes[section]) if section else tuple(classes)
    prefix = f"{section}." if section else ""
    elsewhere = {key: f"{name}.{key}" for name, cls in classes.items() for key in _keys(cls)}
    for key in map(str, given):
        if key in known:
            continue
        if moved := MOVED.get(prefix + key):
            raise ValueError(f"{prefix}{key} has moved: set {moved}")
        near = [elsewhere[key]] if key in elsewhere else []
        near += [f"{prefix}{name}" for name in difflib.get_close_matches(key, known, n=1)]
        near += [elsewhere[name] for name in difflib.get_close_matches(key, elsewhere, n=1)]
        hint = f"did you mean {near[0]}? " if near else ""
        owner = f"the keys of {section}" if section else "the sections"
        raise ValueError(f"unknown key {prefix}{key}: {hint}{owner} are {', '.join(known)}")


def _section(name: str, cls: Any, values: dict[str, Any]) -> Any:
    """Build a section. Raises ValueError that names the first key with a wrong value."""
    types, defaults = get_type_hints(cls), _defaults(cls)
    changed = {}
    for key, value in values.items():
        if value == MISSING:
            raise ValueError(
                f"{name}.{key} is not set: give it in the recipe, or add {name}.{key}=VALUE"
            )
        if types[key] == tuple[str, ...] and isinstance(value, str):
            value = [value]
        # OmegaConf would read 8 as true.
        if types[key] is bool and not isinstance(value, bool | str):
            raise ValueError(_mistyped(f"{name}.{key}", value, bool))
        if value != defaults[key] or type(value) is not type(defaults[key]):
            changed[key] = value
    section = _structured(cls)
    try:
        return OmegaConf.to_object(OmegaConf.merge(section, changed) if changed else section)
    except (OmegaConfBaseException, TypeError, OverflowError):
        for key, value in changed.items():  # one by one, to find the key with the wrong value
            try:
                OmegaConf.merge(section, {key: value})
            # TypeError: keys, not a list; OverflowError: an int that no float holds
            except (OmegaConfBaseException, TypeError, OverflowError) as error:
                raise ValueError(_mistyped(f"{name}.{key}", value, types[key])) from error
        raise


@cache
def _structured(cls: Any) -> Any:
    """Return the section's keys with their types and defaults. `merge` leaves them as they are."""
    return OmegaConf.structured(cls)


def _mistyped(key: str, value: Any, kind: Any) -> str:
    return f"{key}={_shown(value)} has the wrong type: it must be {_words(kind)}"


def _words(kind: Any) -> str:
    """Describe a type: `int | None` is "a whole number or null"."""
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if kind in plain or kind is NoneType:
        return plain.get(kind, "null")
    if is_dataclass(kind):
        return f"keys of {', '.join(_keys(kind))}"
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments)) if arguments[1:] else str(arguments[0])
    if origin in (tuple, list):
        return f"a list, each {_words(arguments[0])}"
    if origin is dict:
        known = is_dataclass(arguments[1])
        return f"labels, each with {_words(arguments[1])}" if known else "keys with values"
    return " or ".join(_words(argument) for argument in arguments)


def _keys(cls: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(cls))


def _following(cls: Any) -> list[str]:
    return [item.name for item in fields(cls) if "follows" in item.metadata]


def _defaults(cls: Any) -> dict[str, Any]:
    """Return the default of each key. Tuples become lists, so that a list in YAML replaces them."""
    values = {}
    for item in fields(cls):
        if "follows" in item.metadata:
            value = None
        elif item.default_factory is dataclasses.MISSING:
            value = item.default
        else:
            value = item.default_factory()
        values[item.name] = list(value) if isinstance(value, tuple) else value
    return values


def _shown(value: Any) -> str:
    """Format a value as YAML on one line."""
    return json.dumps(value, default=str)


def _plain(tree: Any, *, resolve: bool) -> dict[str, Any]:
    """Convert to dictionaries and lists; `${...}` is replaced by its value if `resolve` is True."""
    try:
        container = OmegaConf.to_container(tree, resolve=resolve)
    except OmegaConfBaseException as error:
        raise ValueError(f"a ${{...}} of the recipe has no value: {one_line(error)}") from error
    assert isinstance(container, dict)
    return container
