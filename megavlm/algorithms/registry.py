"""Advantage estimators and policy losses by name: a new one is one file and one line here.

Values are import paths, so that names in a recipe are checked without importing torch.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megavlm.config.algorithm import GRPO, PolicyOptimization
from megavlm.import_path import IMPORT_PATH, import_of_key

if TYPE_CHECKING:
    from megavlm.algorithms.advantages import Estimator
    from megavlm.algorithms.policy_loss import PolicyLoss

ADVANTAGE_ESTIMATORS = {
    "grpo": "megavlm.algorithms.grpo:grpo",
    "rloo": "megavlm.algorithms.grpo:rloo",
    "reinforce_plus_plus": "megavlm.algorithms.reinforce_plus_plus:reinforce_plus_plus",
    "reinforce_plus_plus_baseline": (
        "megavlm.algorithms.reinforce_plus_plus:reinforce_plus_plus_baseline"
    ),
}
POLICY_LOSSES = {
    "clip": "megavlm.algorithms.clip:clip",
    "gspo": "megavlm.algorithms.gspo:gspo",
    "cispo": "megavlm.algorithms.cispo:cispo",
    "sapo": "megavlm.algorithms.sapo:sapo",
}


def check(settings: PolicyOptimization) -> None:
    """Raise ValueError, in one sentence, if the section's policy loss or advantage estimator is
    unknown, cannot be imported or called, or does not fit the other keys.
    """
    taken: set[str] = set()
    _check_name("policy_loss", settings.policy_loss, POLICY_LOSSES)
    if settings.policy_loss not in POLICY_LOSSES:
        taken |= {*_options(load_policy_loss(settings))}
    if isinstance(settings, GRPO):
        taken |= {*_check_estimator(settings)}
    if unknown := sorted(settings.options.keys() - taken):
        raise ValueError(
            f"algorithm.options.{unknown[0]} is a parameter of no function of yours in "
            "algorithm.policy_loss and algorithm.advantage_estimator: remove it, or add the "
            "parameter"
        )


def _check_estimator(settings: GRPO) -> Mapping[str, Any]:
    """Check the advantage estimator, and return the options that it accepts."""
    name = settings.advantage_estimator
    _check_name("advantage_estimator", name, ADVANTAGE_ESTIMATORS)
    if name in ADVANTAGE_ESTIMATORS and settings.responses_per_prompt > 1:
        return {}
    estimator = load_advantage_estimator(settings)
    if estimator.needs_group and settings.responses_per_prompt == 1:
        raise ValueError(
            "algorithm.responses_per_prompt=1 leaves nothing to compare a response with under "
            f"algorithm.advantage_estimator={name}: raise it, or use reinforce_plus_plus"
        )
    return _options(estimator.function)


def load_advantage_estimator(settings: GRPO) -> "Estimator":
    """Return the section's estimator, with its options. Raises ValueError as `check` does."""
    from megavlm.algorithms.advantages import Estimator

    found = _load("advantage_estimator", settings, ADVANTAGE_ESTIMATORS)
    estimator = found if isinstance(found, Estimator) else Estimator(found)
    function = _with_options("advantage_estimator", estimator.function, settings)
    return replace(estimator, function=function)


def load_policy_loss(settings: PolicyOptimization) -> "PolicyLoss":
    """Return the section's policy loss, with its options. Raises ValueError as `check` does."""
    found = _load("policy_loss", settings, POLICY_LOSSES)
    loss: PolicyLoss = _with_options("policy_loss", found, settings)
    return loss


def _check_name(key: str, name: str, built_in: Mapping[str, str]) -> None:
    if name not in built_in and not IMPORT_PATH.fullmatch(name):
        near = difflib.get_close_matches(name, built_in, n=1)
        hint = f"did you mean {near[0]}? Choose" if near else "choose"
        raise ValueError(
            f"algorithm.{key}={name!r} is unknown: {hint} one of {', '.join(built_in)}, or a "
            "function as package.module:function"
        )


def _load(key: str, settings: PolicyOptimization, built_in: Mapping[str, str]) -> Any:
    name = getattr(settings, key)
    _check_name(key, name, built_in)
    found = import_of_key(f"algorithm.{key}", built_in.get(name, name))
    if not callable(found):
        raise ValueError(
            f"algorithm.{key}={name} is not a function: name one that takes (inputs, settings)"
        )
    return found


def _with_options(key: str, function: Callable[..., Any], settings: PolicyOptimization) -> Any:
    """Bind to the function those options for which it has parameters."""
    signature = inspect.signature(function)
    further = list(signature.parameters.values())[2:]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in further)
    names = {p.name for p in further}
    options = {name: x for name, x in settings.options.items() if takes_any or name in names}
    try:
        signature.bind("inputs", "settings", **options)
    except TypeError as error:
        raise ValueError(
            f"algorithm.{key}={getattr(settings, key)} must take two arguments, (inputs, "
            f"settings), and beyond them only what algorithm.options has; it takes {signature}: "
            f"see megavlm/algorithms/{'policy_loss' if key == 'policy_loss' else 'advantages'}.py"
        ) from error
    return partial(function, **options)


def _options(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the options that `_with_options` gave a function."""
    assert isinstance(function, partial)
    return function.keywords
