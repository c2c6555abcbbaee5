"""Tasks by name: what a model is asked, how its responses are scored, and how results are shown.

A task is a package with a `TASK`. Recipes name it in `environment.name` and `reward.name`: a
built-in task by its name in BUILT_IN_TASKS, any other by the dotted name of its package.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megavlm.import_path import import_module, import_object

SINGLE_TURN = "megavlm.environments.single_turn:SingleTurn"
BUILT_IN_TASKS = {
    "geo3k": "megavlm.tasks.geo3k",
    "vqa": "megavlm.tasks.vqa",
    "caption": "megavlm.tasks.caption",
    "geospot": "megavlm.tasks.geospot",
    "zoom": "megavlm.tasks.zoom",
    "miniwob": "megavlm.tasks.miniwob",
}
_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class PublishedData:
    """A data set on the HuggingFace hub.

    name: Name in `megavlm data NAME`.
    train, test: Globs of its files.
    keys: Keys of the `data` section that fit the data set.
    reward: Keys of the `reward` section that fit it.
    """

    name: str
    repository: str
    train: str = "data/train-*.parquet"
    test: str = "data/test-*.parquet"
    keys: Mapping[str, Any] = field(default_factory=dict)
    reward: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """The parts of a task. Functions and classes are import paths (package.module:name), so that a
    process imports only the parts that it uses.

    reward: Reward function, see megavlm/rewards/base.py.
    environment: Class of the episodes, see megavlm/environments/base.py.
    variants: Further classes of episodes, by the name that recipes use for them.
    check_options: Function of **options that raises ValueError for options that the reward cannot
        use.
    check_row: Function of (row, **options) that raises ValueError for a row that the reward cannot
        score.
    prepare_options: Function of (options, folder) that returns the options for the reward
        processes. It runs in the trainer, and may write files for them to `folder`.
    evaluation_page: Function of (candidates, names) that returns HTML for the page of an
        evaluation, "" for nothing. candidates: Models with their responses, see
        megavlm/evaluation/attempts.py. names: Their short names.
    published: Data set of the task.
    demo: Kinds of questions that the demo draws for the task.
    """

    reward: str
    environment: str = SINGLE_TURN
    variants: Mapping[str, str] = field(default_factory=dict)
    check_options: str | None = None
    check_row: str | None = None
    prepare_options: str | None = None
    evaluation_page: str | None = None
    published: PublishedData | None = None
    demo: tuple[str, ...] = ()


def find_task(name: str) -> Task | None:
    """Return the task of that name, or None if there is no such package. Raises ValueError for a
    package that cannot be imported or has no TASK.
    """
    package = BUILT_IN_TASKS.get(name, name)
    if not _PACKAGE.fullmatch(package):
        return None
    try:
        found = getattr(import_module(package), "TASK", None)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and f"{package}.".startswith(f"{error.name}."):
            return None
        raise ValueError(f"the task {name} cannot be imported: {error}") from error
    if not isinstance(found, Task):
        raise ValueError(
            f"the package {name} is not a task: give it TASK = megavlm.task.Task(...), or name a "
            "class or function in it as package.module:name"
        )
    return found


def import_part(path: str) -> Any:
    """Import a function that a task names. Raises ValueError if that fails."""
    try:
        return import_object(path)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"a task names {path}, but it cannot be imported: {error}") from error


def built_in_tasks() -> dict[str, Task]:
    """Return the built-in tasks by name."""
    return {name: task for name in BUILT_IN_TASKS if (task := find_task(name)) is not None}
