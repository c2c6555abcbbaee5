r"""Mathematics with a calculator. The policy may write <calculator>2 * sqrt(3)</calculator>, and
gets the value in the next turn, until it answers in \boxed{...} or after "Answer:".
"""

from megavlm.environments.base import Context, Observation, Step, scored
from megavlm.rewards.base import Example
from megavlm.rewards.boxed import after_answer, last_tagged
from megavlm.tasks.geo3k.arithmetic import calculate, shown

INSTRUCTION = (
    "You have a calculator. To use it, write <calculator>EXPRESSION</calculator> and end your "
    "turn; its result comes back. Then go on. Put the final answer in \\boxed{}."
)


class Calculator:
    def __init__(self, context: Context, instruction: str = INSTRUCTION) -> None:
        """Store the options. instruction: text that is added to the system prompt; "" if the prompt
        already explains the calculator.
        """
        self._score, self._turns = context.score, context.max_turns
        self._instruction = instruction

    async def reset(self, row: Example, seed: int) -> Observation:
        self._row = row
        messages = list(row.messages)
        if self._instruction and messages[0]["role"] == "system":
            text = messages.pop(0)["content"] + "\n" + self._instruction
            messages.insert(0, {"role": "system", "content": text})
        elif self._instruction:
            messages.insert(0, {"role": "system", "content": self._instruction})
        return Observation(messages, row.images)

    async def step(self, text: str) -> Step:
        """Evaluate a calculator call, unless the response also has a final answer."""
        self._turns -= 1
        call = last_tagged(text, "calculator")
        answers = "\\boxed" in text or after_answer(text) is not None
        if call is None or answers or not self._turns:
            return scored(await self._score(text, self._row))
        try:
            result = shown(calculate(call))
        except ValueError as error:
            result = f"error: {error}"
        message = {"role": "user", "content": f"<result>{result}</result>"}
        return Step(Observation([message]), 0.0, False)
