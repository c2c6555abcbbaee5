"""Environments that a user might write, faulty ones among them; loaded in processes."""

import asyncio
import time
from typing import Any

from megavlm.environments.base import Context, Image, Observation, Step
from megavlm.rewards.base import Example


class Faulty:
    """A user's environment that does what its option says."""

    def __init__(self, context: Context, fault: str = "") -> None:
        self.context, self.fault = context, fault

    async def reset(self, row: Example, seed: int) -> Observation:
        self.row = row
        if self.fault == "other starts":
            return Observation([{"role": "user", "content": str(id(self))}])
        match self.fault:
            case "reset raises":
                raise KeyError("as told")
            case "reset blocks":
                time.sleep(1000)
        if self.fault.startswith("starts as"):
            role = "tool" if self.fault.endswith("tool") else "robot"
            return Observation([{"role": role, "content": "How many?"}])
        if self.fault == "own start":
            return Observation([{"role": "user", "content": f"How many? {seed}"}])
        return Observation(row.messages, row.images)

    async def step(self, text: str) -> Step:
        match self.fault:
            case "raise":
                raise KeyError("as told")
            case "hang":
                await asyncio.sleep(1000)
            case "image":
                return Step(Observation(self.row.messages[-1:], [b"no image"]), 0.0, False)
            case "parts":
                return Step(None, 0.0, True, {"parts": {"seen": "much"}})
            case "score twice":
                scores = await asyncio.gather(
                    *(self.context.score(answer, self.row) for answer in (text, "4"))
                )
                worth = scores[0].reward - 2 * scores[1].reward
                return Step(None, worth, True, {"score": scores[0]})
            case "no observation":
                return Step(None, 0.0, False)
            case "endless":
                return Step(Observation(self.row.messages[-1:], self.row.images), 0.1, False)
            case "part":
                content: Any = [{"type": "text", "text": "?"}]
                return Step(Observation([{"role": "user", "content": content}]), 0.0, False)
            case "no content":
                return Step(Observation([{"role": "user"}]), 0.0, False)
            case "mixed":
                content = ["look", Image(self.row.images[0])]
                messages: Any = [
                    {"role": "user", "content": content},
                    {"role": "user", "content": 3},
                ]
                return Step(Observation(messages), 0.0, False)
            case "counts":
                return Step(None, 0.0, True, {"counts": {"clicks": "many"}})
            case "endless counts":
                return Step(None, 0.0, True, {"counts": {"clicks": float("nan")}})
            case "role":
                return Step(Observation([{"role": "robot", "content": "x"}]), 0.0, False)
            case "surrogate":
                return Step(Observation([{"role": "user", "content": "\ud83d"}]), 0.0, False)
            case "echo":
                return Step(Observation([{"role": "user", "content": text}]), 0.0, False)
            case "placeholder":
                marked = {"role": "user", "content": "<image> or <image>?"}
                return Step(Observation([marked], self.row.images), 0.0, False)
        return Step(None, 0.7, True, {"correct": True, "parts": {"seen": 1.0}})


class Seeded:
    """Asks a question of its own, made from the seed."""

    def __init__(self, context: Context) -> None:
        pass

    async def reset(self, row: Example, seed: int) -> Observation:
        return Observation([{"role": "user", "content": f"What colour? {seed}"}])

    async def step(self, text: str) -> Step:
        return Step(None, 1.0, True, {})
