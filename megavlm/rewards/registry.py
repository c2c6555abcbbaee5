"""Names of rewards in a recipe: a built-in one, a task, `package.module:function`, or a service's
URL.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megavlm.import_path import IMPORT_PATH, import_object
from megavlm.rewards.base import CONTEXT, check_answer
from megavlm.task import BUILT_IN_TASKS, Task, find_task, import_part

RewardFunction = Callable[..., Any]  # signature: see base.py

# Rewards that belong to no task.
BUILT_IN_REWARDS = {
    "boxed": "megavlm.rewards.boxed:score",
    "exact_match": "megavlm.rewards.exact_match:score",
    "zero": "megavlm.rewards.zero:of_row",
}
_WITHOUT_ANSWER = {"zero"}
REWARD_MODEL = "reward_model"


def check_reward_name(name: str) -> None:
    """Check a reward's name without loading the reward. Raises ValueError if it is unknown."""
    if name in BUILT_IN_REWARDS or is_remote(name) or IMPORT_PATH.fullmatch(name):
        return
    if reward_task(name) is None:
        known = ", ".join(sorted([*BUILT_IN_REWARDS, *BUILT_IN_TASKS, REWARD_MODEL]))
        raise ValueError(
            f"reward.name={name!r} is unknown: choose one of {known}, a function as "
            "package.module:function, the package of a task, or a service as "
            "http://HOST:PORT/PATH"
        )


def reward_task(name: str) -> Task | None:
    """Return the task whose reward has that name. None for a reward that belongs to no task."""
    return None if name in BUILT_IN_REWARDS or is_remote(name) else find_task(name)


def is_remote(name: str) -> bool:
    return name == REWARD_MODEL or name.startswith(("http://", "https://"))


def load_reward(
    name: str, options: Mapping[str, Any], key: str = "reward.options"
) -> RewardFunction:
    """Import the function, and check its options, which the recipe has at `key`. Raises ValueError
    for an option that it cannot use or something that is not a function, and any error of the
    import.
    """
    task = reward_task(name)
    path = BUILT_IN_REWARDS.get(name, name) if task is None else task.reward
    function: RewardFunction = import_object(path)
    if not callable(function):
        raise ValueError(f"{name} is not a function")
    takes = arguments(function).options
    if not _takes_any(function):
        check_names(name, options, takes, key)
    with naming(key):
        check_options(name, options)
    return function


def check_names(name: str, options: Iterable[str], takes: Sequence[str], key: str) -> None:
    """Raise ValueError for an option that is not among those that a reward takes."""
    if unknown := sorted(set(options) - set(takes)):
        known = ", ".join(takes) or "none"
        raise ValueError(f"{key}.{unknown[0]}: {name} takes no such option; it has {known}")


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Add the recipe's key to a ValueError about its value."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Let a task check the options of its reward. Raises ValueError for an option that it cannot
    use. Other rewards are not checked.
    """
    task = reward_task(name)
    if task is not None and task.check_options is not None:
        import_part(task.check_options)(**options)


def prepare_options(name: str, options: Mapping[str, Any], folder: str) -> Mapping[str, Any]:
    """Return the options that the reward processes get. A task may write files for them to
    `folder`.
    """
    task = reward_task(name)
    if task is None or task.prepare_options is None:
        return options
    prepared: Mapping[str, Any] = import_part(task.prepare_options)(options, folder)
    return prepared


def check_reward_row(name: str, row: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check that the row has the answer or columns that a built-in reward or a task needs. Raises
    ValueError if not. Other rewards are not checked.
    """
    task = reward_task(name)
    if name in BUILT_IN_REWARDS.keys() - _WITHOUT_ANSWER:
        check_answer(row)
    elif task is not None and task.check_row is not None:
        import_part(task.check_row)(row, **options)


@dataclass(frozen=True)
class RewardArguments:
    """The arguments of a reward function.

    is_group: True if it scores a whole group. options: Names of its options, and, if it has
    **options, of the options that a curriculum may set. context: The names from CONTEXT that it
    asks for.
    """

    is_group: bool
    options: Sequence[str]
    context: Sequence[str]


def arguments(function: RewardFunction) -> RewardArguments:
    """Return the arguments of a function. Raises ValueError if it takes neither one response nor a
    group.
    """
    parameters = list(inspect.signature(function).parameters.values())
    names = {parameter.name for parameter in parameters}
    is_group = {"responses", "rows"} <= names
    if "responses" in names and (not is_group or "response" in names):
        other = "response" if "response" in names else "no rows"
        raise ValueError(
            f"it has the parameter responses and {other}: a reward takes a response and its row, "
            "or the responses and rows of a group"
        )
    if is_group:
        parameters = [p for p in parameters if p.name not in ("responses", "rows")]
    else:
        parameters = parameters[2:]  # the response and its row, whatever their names are
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = {p.name for p in parameters if p.kind in by_name}
    further = {"tolerance", "weights"} if _takes_any(function) else set()
    options = (takes - set(CONTEXT)) | further
    return RewardArguments(is_group, sorted(options), sorted(takes & set(CONTEXT)))


def _takes_any(function: RewardFunction) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
