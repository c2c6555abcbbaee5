"""Advantage estimators and policy losses by name: a new one is one file and one line here.

Values are import paths, so that names in a recipe are checked without importing torch.
"""

import difflib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megavlm.config.algorithm import GRPO, PolicyOptimization
from megavlm.config.import_path import IMPORT_PATH, import_module

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
}


def check(settings: PolicyOptimization) -> None:
    """Raise ValueError, in one sentence, if the section's policy loss or advantage estimator is
    unknown, cannot be imported or called, or does not go with the other keys.
    """
    _check_name("policy_loss", settings.policy_loss, POLICY_LOSSES)
    if settings.policy_loss not in POLICY_LOSSES:
        load_policy_loss(settings.policy_loss)
    if not isinstance(settings, GRPO):
        return
    name = settings.advantage_estimator
    _check_name("advantage_estimator", name, ADVANTAGE_ESTIMATORS)
    if name in ADVANTAGE_ESTIMATORS and settings.responses_per_prompt > 1:
        return
    if load_advantage_estimator(name).needs_group and settings.responses_per_prompt == 1:
        raise ValueError(
            "algorithm.responses_per_prompt=1 leaves nothing to compare a response with under "
            f"algorithm.advantage_estimator={name}: raise it, or use reinforce_plus_plus"
        )


def load_advantage_estimator(name: str) -> "Estimator":
    """Return the estimator of that name or import path. Raises ValueError as `check` does."""
    from megavlm.algorithms.advantages import Estimator

    found = _load("advantage_estimator", name, ADVANTAGE_ESTIMATORS)
    return found if isinstance(found, Estimator) else Estimator(found)


def load_policy_loss(name: str) -> "PolicyLoss":
    """Return the policy loss of that name or import path. Raises ValueError as `check` does."""
    loss: PolicyLoss = _load("policy_loss", name, POLICY_LOSSES)
    return loss


def _check_name(key: str, name: str, built_in: Mapping[str, str]) -> None:
    if name not in built_in and not IMPORT_PATH.fullmatch(name):
        near = difflib.get_close_matches(name, built_in, n=1)
        hint = f"did you mean {near[0]}? Choose" if near else "choose"
        raise ValueError(
            f"algorithm.{key}={name!r} is unknown: {hint} one of {', '.join(built_in)}, or a "
            "function as package.module:function"
        )


def _load(key: str, name: str, built_in: Mapping[str, str]) -> Any:
    _check_name(key, name, built_in)
    module, _, attribute = built_in.get(name, name).partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"algorithm.{key}={name} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(
            f"algorithm.{key}={name} is not a function: name one that takes (inputs, settings)"
        )
    try:
        inspect.signature(found).bind("inputs", "settings")
    except TypeError as error:
        raise ValueError(
            f"algorithm.{key}={name} must take two arguments, (inputs, settings), and takes "
            f"{inspect.signature(found)}: see megavlm/algorithms/"
            f"{'policy_loss' if key == 'policy_loss' else 'advantages'}.py"
        ) from error
    return found
