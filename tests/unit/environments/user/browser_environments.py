"""Pages whose script tells the reward, for tests of browsers."""

from megavlm.environments.base import Step
from megavlm.environments.browser.environment import Browser


class Scripted(Browser):
    async def outcome(self, answer: str | None) -> Step | None:
        reward = await self.evaluate("window.result ?? null")
        if reward is None and answer is None:
            return None
        return Step(None, float(reward or 0), True, {"correct": bool(reward)})
