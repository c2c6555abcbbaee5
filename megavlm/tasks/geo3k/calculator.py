"""Mathematics with a calculator: the policy calls it and reads the value in the next turn, until it
answers without a call.
"""

from megavlm.environments.base import Context, Observation
from megavlm.environments.tools.environment import ToolEnvironment
from megavlm.environments.tools.tool import ToolError, tool
from megavlm.rewards.base import Example
from megavlm.tasks.geo3k.arithmetic import calculate, shown


class Calculator(ToolEnvironment):
    runs_in_driver = True

    def __init__(self, context: Context, show_tools: bool = True) -> None:
        """Store the option. show_tools: False if the prompt already explains the calculator."""
        super().__init__(context)
        self._show_tools = show_tools

    async def reset(self, row: Example, seed: int) -> Observation:
        shown = await super().reset(row, seed)
        return shown if self._show_tools else Observation(shown.messages, shown.images)

    @tool
    async def calculator(self, expression: str) -> str:
        """Compute the value of an expression: + - * / ^, parentheses, pi and e, and the usual
        functions, such as sqrt, sin (of radians), radians, degrees and log.
        """
        try:
            return shown(calculate(expression))
        except ValueError as error:
            raise ToolError(str(error)) from error
