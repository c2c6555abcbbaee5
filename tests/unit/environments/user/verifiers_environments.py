"""Environments of verifiers' classic interface."""

import asyncio
import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset
from PIL import Image as Picture

ROWS = Dataset.from_list([{"question": "How many?", "answer": "3", "info": {"least": 2}}])


def right(completion: Any, answer: str) -> float:
    """Compare the last response with the answer."""
    return float(completion[-1]["content"] == answer)


def brief(completion: Any) -> float:
    return 1.0 / len(completion)


def single() -> vf.Environment:
    rubric = vf.Rubric([right, brief], [1.0, 0.5])
    return vf.SingleTurnEnv(dataset=ROWS, rubric=rubric, system_prompt="Be brief.")


class Hints(vf.MultiTurnEnv):
    """Shows a picture as bright as the guess, until the guess is right."""

    def __init__(self, log: str = "", **options: Any) -> None:
        super().__init__(dataset=ROWS, rubric=vf.Rubric([right]), **options)
        self._log, self._lock = log, asyncio.Lock()

    async def setup_state(self, state: Any) -> Any:
        state["least"] = state["info"]["least"]
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        said = messages[-1]["content"]
        if said == "crash":
            raise RuntimeError("no such guess")
        if said == "give up":
            raise vf.Error("the environment is broken")
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return []
        async with self._lock:
            await asyncio.sleep(0.01)
        file = BytesIO()
        Picture.new("RGB", (32, 32), (int(said), 0, 0)).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        image = {"type": "image_url", "image_url": {"url": url}}
        hint = {"type": "text", "text": f"It is at least {state['least']}."}
        return [{"role": "user", "content": [hint, image]}]

    @vf.cleanup
    async def note(self, state: Any) -> None:
        if self._log:
            with Path(self._log).open("a") as file:
                file.write("ended\n")


class Forgetful(Hints):
    """Leaves out all but the last turn."""

    async def get_prompt_messages(self, state: Any) -> Any:
        messages = await super().get_prompt_messages(state)
        return messages[-1:]


def hints(log: str = "", max_turns: int = -1) -> vf.Environment:
    return Hints(log, max_turns=max_turns)


def forgetful() -> vf.Environment:
    return Forgetful()


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def tools() -> vf.Environment:
    return vf.ToolEnv(tools=[add], dataset=ROWS, rubric=vf.Rubric([right]))


def grouped() -> vf.Environment:
    def best(completions: Any) -> list[float]:
        return [1.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([best]))


def load_environment(**options: Any) -> vf.Environment:
    """Return what the id verifiers-environments names."""
    return single(**options)
