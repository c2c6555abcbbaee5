"""Names of rewards in a recipe: a built-in one, `package.module:function`, or a service's URL."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megavlm.config.import_path import IMPORT_PATH, import_module
from megavlm.rewards.base import check_answer

RewardFunction = Callable[..., Any]  # signature: see base.py

# Modules are loaded in the reward processes on demand: the one for math takes half a second.
BUILT_IN_REWARDS = {
    "boxed": "megavlm.rewards.boxed:of_row",
    "caption": "megavlm.tasks.caption.reward:score",
    "exact_match": "megavlm.rewards.exact_match:of_row",
    "geo3k": "megavlm.tasks.geo3k.reward:score",
    "geospot": "megavlm.tasks.geospot.reward:score",
    "vqa": "megavlm.tasks.vqa.reward:score",
}
_CHECK_ROWS = ("caption", "geospot")  # have their own check_row; the others need an answer
REWARD_MODEL = "reward_model"


def check_reward_name(name: str, key: str = "reward.name") -> None:
    """Check the form of a reward's name without loading it. Raises ValueError if it is unknown."""
    if name not in BUILT_IN_REWARDS and not is_remote(name) and not IMPORT_PATH.fullmatch(name):
        known = ", ".join(sorted([*BUILT_IN_REWARDS, REWARD_MODEL]))
        raise ValueError(
            f"{key}={name!r} is unknown: choose one of {known}, a function as "
            "package.module:function, or a service as http://HOST:PORT/PATH"
        )


def is_remote(name: str) -> bool:
    return name == REWARD_MODEL or name.startswith(("http://", "https://"))


def load_reward(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """Import the function, and let a built-in one check its options. Raises ValueError for an
    unknown option or something that is not a function, and any error of the import.
    """
    module_name, _, attribute = BUILT_IN_REWARDS.get(name, name).partition(":")
    module = import_module(module_name)
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(f"{name} is not a function")
    takes = arguments(function) - {"images"}
    if (unknown := sorted(set(options) - takes)) and not _takes_any(function):
        known = ", ".join(sorted(takes)) or "none"
        raise ValueError(f"it takes no option {unknown[0]!r}; its options are: {known}")
    if name in BUILT_IN_REWARDS and hasattr(module, "prepare"):
        module.prepare(**options)
    return function


def check_reward_row(name: str, row: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check that the row has the answer or columns that a built-in reward needs. Raises ValueError
    if not. Other rewards are not checked.
    """
    if name in _CHECK_ROWS:
        import_module(BUILT_IN_REWARDS[name].partition(":")[0]).check_row(row, **options)
    elif name in BUILT_IN_REWARDS:
        check_answer(row)


def arguments(function: RewardFunction) -> set[str]:
    """Return the names of a function's options, and, if it has **options, the options that a
    curriculum may set. They include "images" if the function has that parameter.
    """
    parameters = list(inspect.signature(function).parameters.values())[2:]
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return names | {"tolerance", "weights"} if _takes_any(function) else names


def _takes_any(function: RewardFunction) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
