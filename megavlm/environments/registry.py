"""Names of environments in a recipe: single_turn, tools, gateway, an adapter to another library, a
task or one of its variants, or package.module:Class.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from megavlm.environments.agent import GATEWAY
from megavlm.environments.base import Context, Environment
from megavlm.import_path import IMPORT_PATH, import_object
from megavlm.task import SINGLE_TURN, built_in_tasks, find_task

_AGENT = "megavlm.environments.agent:Agent"
_TOOLS = "megavlm.environments.tools.environment:ToolEnvironment"
# Adapters to other libraries. Each is an extra of setup.py by the same name.
_ADAPTERS = {
    "gymnasium": "megavlm.environments.adapters.gymnasium:Gymnasium",
    "openenv": "megavlm.environments.adapters.openenv:OpenEnv",
    "verifiers": "megavlm.environments.adapters.verifiers:Verifiers",
}
_EXTRAS = {"playwright": "browser"}  # of other environments, by the package that is missing


@dataclass(frozen=True)
class NamedEnvironment:
    """The environment that a recipe names. path: Import path of its class. task: Name of its task,
    if it has one.
    """

    path: str
    task: str | None = None

    @property
    def reward(self) -> str:
        """The name of its reward where the recipe names none."""
        return "zero" if self.is_adapter else self.task or "exact_match"

    @property
    def starts_from_row(self) -> bool:
        """True if an episode is one response to the row's own prompt."""
        return self.path == SINGLE_TURN

    @property
    def is_adapter(self) -> bool:
        """True if it is an adapter to another library, which gives its own rewards."""
        return self.path in _ADAPTERS.values()

    @property
    def is_built_in(self) -> bool:
        return self.path.startswith("megavlm.") and not self.is_adapter


def built_in_environments() -> dict[str, NamedEnvironment]:
    """Return the environments that need no other package, by name."""
    found = {
        "single_turn": NamedEnvironment(SINGLE_TURN),
        "tools": NamedEnvironment(_TOOLS),
        GATEWAY: NamedEnvironment(_AGENT),
    }
    for name, task in built_in_tasks().items():
        found[name] = NamedEnvironment(task.environment, name)
        found |= {variant: NamedEnvironment(path, name) for variant, path in task.variants.items()}
    return found


def find_environment(name: str) -> NamedEnvironment:
    """Return the environment of that name, without loading its class. Raises ValueError for an
    unknown name.
    """
    if IMPORT_PATH.fullmatch(name):
        return NamedEnvironment(name)
    known = {adapter: NamedEnvironment(path) for adapter, path in _ADAPTERS.items()}
    known |= built_in_environments()
    if name in known:
        return known[name]
    if (task := find_task(name)) is None:
        raise ValueError(
            f"environment.name={name!r} is unknown: choose one of {', '.join(known)}, a class "
            "as package.module:Class, or the package of a task"
        )
    return NamedEnvironment(task.environment, name)


def load_environment(
    name: str, options: Mapping[str, Any], tools: Sequence[str] = ()
) -> type[Environment]:
    """Return the class. Raises ValueError if it cannot be imported, does not have the options, or
    does not call the tools of a recipe.
    """
    try:
        found = import_object(find_environment(name).path)
    except (ImportError, AttributeError) as error:
        extra = name if name in _ADAPTERS else _EXTRAS.get(getattr(error, "name", ""))
        advice = f": pip install 'megavlm[{extra}]'" if extra else ""
        raise ValueError(
            f"environment.name={name}: it cannot be imported ({error}){advice}"
        ) from error
    if not inspect.isclass(found) or not all(
        inspect.iscoroutinefunction(getattr(found, method, None)) for method in ("reset", "step")
    ):
        raise ValueError(f"environment.name={name} has not reset and step as async methods")
    if tools:
        from megavlm.environments.tools.environment import ToolEnvironment  # imports pydantic

        if not issubclass(found, ToolEnvironment):
            raise ValueError(
                f"environment.tools={list(tools)}: environment.name={name} calls no tools; set "
                "environment.name=tools, or let your class extend ToolEnvironment"
            )
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


async def close(environment: Environment) -> None:
    """Call the environment's close, if it has one; it may be async or not."""
    method = getattr(environment, "close", None)
    if method is not None and inspect.isawaitable(result := method()):
        await result
