"""Environments that register themselves with gymnasium."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from megavlm.environments.adapters.gymnasium import Gymnasium


class Walk(gymnasium.Env):
    """A line of five cells. The observation is a picture of the player's cell."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}
    action_space = spaces.Discrete(2, start=1)
    observation_space = spaces.Box(0, 255, (32, 160, 3), np.uint8)

    def __init__(self, render_mode: str | None = None, log: str = "") -> None:
        self.render_mode, self._log = render_mode, log

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._cell = int(self.np_random.integers(1, 4))
        return self._picture(200), {}

    def step(self, action: int) -> Any:
        self._cell += 1 if action == 2 else -1
        at_end = self._cell in (0, 4)
        return self._picture(200), float(self._cell == 4) if at_end else -0.1, at_end, False, {}

    def render(self) -> Any:
        return self._picture(100)

    def close(self) -> None:
        if self._log:
            with open(self._log, "a") as file:
                file.write("closed\n")

    def _picture(self, value: int) -> np.ndarray:
        picture = np.zeros((32, 160, 3), np.uint8)
        picture[:, 32 * self._cell : 32 * self._cell + 32] = value
        return picture


class Parrot(gymnasium.Env):
    """Says each text again, three times at most."""

    action_space = spaces.Text(20)
    observation_space = spaces.Dict(
        said=spaces.Text(20), view=Walk.observation_space, size=spaces.Box(0, 9, (2,), np.int64)
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._turns = 0
        return self._seen("-"), {}

    def step(self, action: str) -> Any:
        self._turns += 1
        return self._seen(action), 0.5, False, self._turns == 3, {}

    def _seen(self, said: str) -> Any:
        picture = np.full((32, 160, 3), self._turns, np.uint8)
        return {"said": said, "view": picture, "size": np.array([2, 3])}


class Many(gymnasium.Env):
    """Takes actions of several parts, and shows the last one."""

    action_space = spaces.Dict(
        move=spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32))),
        word=spaces.Text(5),
    )
    observation_space = spaces.Text(200)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "begin", {}

    def step(self, action: Any) -> Any:
        return (
            f"{action['move'][0]} {action['move'][1].tolist()} {action['word']}",
            0,
            False,
            False,
            {},
        )


class Counted(Gymnasium):
    """An environment of one's own on top of the adapter."""

    def __init__(self, context: Any, length: int) -> None:
        super().__init__(context, "gym_environments:Walk-v0", actions=["back", "forth"])
        self.length = length

    def parts(self, observation: Any) -> list[Any]:
        return [f"{self.length} cells, and you are in cell {observation[0, :, 0].argmax() // 32}"]


for cls in (Walk, Parrot, Many):
    gymnasium.register(f"{cls.__name__}-v0", cls, disable_env_checker=True)
