"""Mathematics with a calculator: the policy calls it and reads the value in the next turn, until it
answers without a call.
"""

from megavlm.environments.tools.environment import ToolEnvironment
from megavlm.environments.tools.tool import ToolError, tool
from megavlm.tasks.geo3k.arithmetic import calculate, shown


class Calculator(ToolEnvironment):
    runs_in_driver = True

    @tool
    async def calculator(self, expression: str) -> str:
        """Compute the value of an expression: + - * / ^, parentheses, pi and e, and the usual
        functions, such as sqrt, sin (of radians), radians, degrees and log.
        """
        try:
            return shown(calculate(expression))
        except ValueError as error:
            raise ToolError(str(error)) from error
