"""Names of environments in a recipe: a built-in one, or package.module:Class."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from megavlm.config.import_path import IMPORT_PATH, import_module
from megavlm.environments.base import Context, Environment


@dataclass(frozen=True)
class BuiltIn:
    """Built-in environment. reward: its default reward if the recipe names none."""

    path: str
    reward: str

    @property
    def starts_from_row(self) -> bool:
        """True if an episode is one response to the row's own prompt."""
        return self.path == _SINGLE


_SINGLE = "megavlm.environments.single_turn:SingleTurn"
BUILT_IN_ENVIRONMENTS = {
    "single_turn": BuiltIn(_SINGLE, "exact_match"),
    "geo3k": BuiltIn(_SINGLE, "geo3k"),
    "geo3k_calculator": BuiltIn("megavlm.tasks.geo3k.calculator:Calculator", "geo3k"),
    "vqa": BuiltIn(_SINGLE, "vqa"),
    "vqa_retry": BuiltIn("megavlm.tasks.vqa.retry:Retry", "vqa"),
    "caption": BuiltIn(_SINGLE, "caption"),
    "geospot": BuiltIn(_SINGLE, "geospot"),
}


def default_reward(name: str) -> str:
    return BUILT_IN_ENVIRONMENTS[name].reward if name in BUILT_IN_ENVIRONMENTS else "exact_match"


def check_environment_name(name: str) -> None:
    """Check the form of an environment's name, without loading it. Raises ValueError for an unknown
    one.
    """
    if name not in BUILT_IN_ENVIRONMENTS and not IMPORT_PATH.fullmatch(name):
        known = ", ".join(BUILT_IN_ENVIRONMENTS)
        raise ValueError(
            f"environment.name={name!r} is unknown: choose one of {known}, or a class as "
            "package.module:Class"
        )


def load_environment(name: str, options: Mapping[str, Any]) -> type[Environment]:
    """Return the class. Raises ValueError if it cannot be imported or does not have the options."""
    path = BUILT_IN_ENVIRONMENTS[name].path if name in BUILT_IN_ENVIRONMENTS else name
    module, _, attribute = path.partition(":")
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"environment.name={name}: it cannot be imported ({error})") from error
    if not inspect.isclass(found) or not all(
        inspect.iscoroutinefunction(getattr(found, method, None)) for method in ("reset", "step")
    ):
        raise ValueError(f"environment.name={name} has not reset and step as async methods")
    parameters = inspect.signature(found).parameters
    takes = [name for name in list(parameters)[1:]]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if (unknown := sorted(set(options) - set(takes))) and not anything:
        raise ValueError(
            f"environment.options.{unknown[0]}: {name} takes no such option; it has "
            f"{', '.join(takes) or 'none'}"
        )
    return cast("type[Environment]", found)


def make(cls: type[Environment], context: Context, options: Mapping[str, Any]) -> Environment:
    factory: Any = cls
    return factory(context, **options)
