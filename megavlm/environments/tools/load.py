"""Tools that a recipe names in environment.tools."""

from collections.abc import Sequence

from megavlm.config.import_path import import_object
from megavlm.environments.tools.tool import Tool


def load_tools(named: Sequence[str]) -> list[Tool]:
    """Import the functions. Raises ValueError for one that cannot be imported or be a tool, and for
    two of one name.
    """
    tools: dict[str, Tool] = {}
    for path in named:
        try:
            function = import_object(path)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"environment.tools: {path} cannot be imported ({error})") from error
        if not callable(function):
            raise ValueError(f"environment.tools: {path} is not a function")
        tool = Tool.of(function)
        if tool.name in tools:
            raise ValueError(f"environment.tools has two tools named {tool.name}: rename one")
        tools[tool.name] = tool
    return list(tools.values())
