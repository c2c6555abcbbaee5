"""Environments of gymnasium, for environment.name=gymnasium."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from megavlm.environments.adapters.messages import mistake, opening, written_action
from megavlm.environments.base import Context, Image, Observation, Step
from megavlm.environments.content import parts_of
from megavlm.rewards.base import Example


class Gymnasium:
    """An episode of a gymnasium environment.

    The prompt is the row's, which tells the policy what to do, and the first observation. The
    policy writes an action in <action></action>, or as its whole response. An action that cannot be
    read uses up a turn, but the environment does not see it.

    Override `parts` to show observations in another way, and `read` for other actions.
    """

    def __init__(
        self,
        context: Context,
        id: str,
        make: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        show: Literal["observation", "render", "both"] = "observation",
    ) -> None:
        """Make the environment.

        id: Id of the environment; module:Name-v0 imports the module that registers it.
        make: Arguments of gymnasium.make.
        actions: Names of the actions of a discrete space, from the smallest one on. Without them,
            the policy writes numbers.
        show: What the policy sees. render and both need make={render_mode: rgb_array}.
        """
        self.env = gymnasium.make(id, **(make or {}))
        self._chat, self._show = context.chat, show
        self._actions = [name.lower() for name in actions]

    async def check(self) -> None:
        """Raise ValueError for options that do not fit the environment."""
        space = self.env.action_space
        if self._actions and getattr(space, "n", None) != len(self._actions):
            raise ValueError(
                f"environment.options.actions has {len(self._actions)} names for {space}: name "
                "each action of a discrete space"
            )
        if self._show not in ("observation", "render", "both"):
            raise ValueError(
                f"environment.options.show={self._show}: choose observation, render or both"
            )
        if self._show != "observation" and self.env.render_mode != "rgb_array":
            raise ValueError(
                f"environment.options.show={self._show} needs pixels: set "
                "environment.options.make.render_mode=rgb_array"
            )

    async def reset(self, row: Example, seed: int) -> Observation:
        observation, _ = self.env.reset(seed=seed)
        return opening(row, self.parts(observation))

    async def step(self, text: str) -> Step:
        try:
            action = self.read(written_action(text, self._chat))
        except ValueError as problem:
            return mistake(str(problem))
        observation, reward, terminated, truncated, _ = self.env.step(action)
        if terminated or truncated:
            return Step(None, float(reward), True)
        shown = Observation([{"role": "user", "content": self.parts(observation)}])
        return Step(shown, float(reward), False)

    def close(self) -> None:
        self.env.close()

    def parts(self, observation: Any) -> list[str | Image]:
        """Return what the policy sees of an observation."""
        parts = [] if self._show == "render" else parts_of(observation)
        return parts if self._show == "observation" else [Image.of(self.env.render()), *parts]

    def read(self, text: str) -> Any:
        """Return the action that the policy has written. Raises ValueError, whose message the
        policy reads, if there is none.
        """
        space = self.env.action_space
        if self._actions:
            if text.lower() not in self._actions:
                names = ", ".join(self._actions)
                raise ValueError(f"{text[:40]!r} is not an action; write one of {names}")
            return space.start + self._actions.index(text.lower())
        try:
            action = text if isinstance(space, spaces.Text) else _cast(json.loads(text), space)
            fits = space.contains(action)
        except (AttributeError, TypeError, ValueError, OverflowError, RecursionError):
            fits = False
        if not fits:
            raise ValueError(f"{text[:40]!r} is not an action; actions are {space}")
        return action


def _cast(value: Any, space: Any) -> Any:
    """Return a value that was read from JSON with the types of a space. Raises TypeError or
    ValueError for one that a space holds only after it is changed.
    """
    if isinstance(space, spaces.Dict):
        if value.keys() != space.keys():
            raise ValueError
        return {name: _cast(value[name], part) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_cast(one, part) for one, part in zip(value, space.spaces, strict=True))
    if isinstance(space, spaces.Text):
        return value
    _check_numbers(value)
    if isinstance(space, spaces.Discrete):
        return value
    given = np.array(value)
    array = given.astype(space.dtype)
    if np.issubdtype(array.dtype, np.integer) and not np.array_equal(array, given):
        raise ValueError
    return array


def _check_numbers(value: Any) -> None:
    """Raise TypeError or ValueError for a value that is not a finite number or a list of them: for
    numpy, true is 1 and "1" is a number.
    """
    if isinstance(value, list):
        for one in value:
            _check_numbers(one)
    elif isinstance(value, bool) or not math.isfinite(value):
        raise ValueError
