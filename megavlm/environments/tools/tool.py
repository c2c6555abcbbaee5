"""Tools as functions: their JSON schema from types and docstring, and calls with checked
arguments.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MethodType
from typing import Any, cast

from pydantic import PydanticUserError, TypeAdapter, ValidationError, validate_call

from megavlm.environments.base import Content
from megavlm.environments.content import content_of
from megavlm.environments.tools.schemas import shortened

_MARK = "_megavlm_tool"


class ToolError(ValueError):
    """A call that has failed. The policy reads the message."""


@dataclass(frozen=True)
class Tool:
    """A tool that a policy may call.

    schema: Its function in OpenAI's form: name, description and the JSON schema of its parameters.
    function: Takes the arguments by name and returns any value that `content_of` takes. It may be
        async; otherwise it runs in a thread.
    """

    schema: Mapping[str, Any]
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        name: str = self.schema["name"]
        return name

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Tool":
        """Make a tool from a function with typed arguments and a docstring.

        Raises ValueError for a function without a docstring, or with an argument whose type is
        missing or has no JSON schema.
        """
        name = getattr(function, "__name__", str(function))
        if not (description := inspect.getdoc(function)):
            raise ValueError(f"the tool {name} has no docstring: tell the policy what it does")
        for parameter in inspect.signature(function).parameters.values():
            if parameter.annotation is parameter.empty:
                raise ValueError(f"the tool {name} has no type for its argument {parameter.name}")
        try:
            parameters = TypeAdapter[Any](cast(Any, function)).json_schema()
            checked = validate_call(function)
        except PydanticUserError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"the tool {name} has a type without a schema: {reason}") from error
        schema = {"name": name, "description": description, "parameters": shortened(parameters)}
        return cls(schema, checked)

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> Content:
        """Call the tool. Raises ToolError, with a sentence for the policy, if an argument is wrong,
        the function raises, its result cannot be shown, or there is none in time.
        """
        try:
            async with asyncio.timeout(seconds):
                return content_of(await self._run(arguments))
        except ValidationError as error:
            raise ToolError(f"{self.name}: {_problems(error)}") from error
        except TimeoutError as error:
            raise ToolError(f"{self.name}: no result in {seconds:.3g} s") from error
        except ToolError:
            raise
        # A tool may raise anything; it is an observation for the policy.
        except Exception as error:
            raise ToolError(f"{self.name}: {error or type(error).__name__}"[:500]) from error

    async def _run(self, arguments: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(inspect.unwrap(self.function)):
            return await self.function(**arguments)
        result = await asyncio.to_thread(self.function, **arguments)
        return await result if isinstance(result, Awaitable) else result


def tool(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method of a ToolEnvironment as a tool."""
    setattr(method, _MARK, True)
    return method


def marked_tools(environment: object) -> list[Tool]:
    """Return the tools of an environment's class, bound to this environment."""
    methods = [getattr(environment, name) for name in marked_names(type(environment))]
    return [
        _method_tool(m.__func__, m.__self__) if inspect.ismethod(m) else Tool.of(m) for m in methods
    ]


def _method_tool(function: Callable[..., Any], owner: object) -> Tool:
    of_class = _class_tool(function)
    return replace(of_class, function=MethodType(of_class.function, owner))


@cache
def _class_tool(function: Callable[..., Any]) -> Tool:
    """Return the tool of a method, whose function also takes the object. Pydantic needs more than a
    millisecond for it, which would be longer than most episodes' own work.
    """
    return replace(Tool.of(MethodType(function, object())), function=validate_call(function))


def marked_names(environment: type) -> list[str]:
    """Return the names of the methods of a class that are marked as tools, in the order in which
    they are defined.
    """
    names: dict[str, None] = {}
    for cls in reversed(environment.__mro__):
        names |= {name: None for name, value in vars(cls).items() if hasattr(value, _MARK)}
    return list(names)


def _problems(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found)
