"""The row's question with more tries after a wrong answer; each try is worth less than the one
before.
"""

from megavlm.environments.base import Context, Observation, Step
from megavlm.rewards.base import Example


class Retry:
    runs_in_driver = True

    def __init__(
        self,
        context: Context,
        discount: float = 0.5,
        message: str = "No. Look again.",
        show: bool = False,
    ) -> None:
        """Store the options. discount: factor of the reward for each earlier try. show: show the
        images again.
        """
        self._score, self._turns = context.score, context.max_turns
        self._discount, self._message, self._show = discount, message, show
        self._worth = 1.0

    async def reset(self, row: Example, seed: int) -> Observation:
        self._row = row
        return Observation(row.messages, row.images)

    async def step(self, text: str) -> Step:
        self._turns -= 1
        score = await self._score(text, self._row)
        if score.correct or score.failure or not self._turns:
            return Step(None, self._worth * score.reward, True, {"score": score})
        self._worth *= self._discount
        message = {"role": "user", "content": self._message}
        return Step(Observation([message], self._row.images if self._show else ()), 0.0, False)
