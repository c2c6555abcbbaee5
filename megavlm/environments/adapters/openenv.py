"""Environments on a server of OpenEnv, for environment.name=openenv."""

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from megavlm.environments.adapters.messages import mistake, opening, written_action
from megavlm.environments.base import Context, Image, Observation, Step
from megavlm.environments.tools.schemas import strict_json
from megavlm.rewards.base import Example

_MAX_MESSAGE = 100 * 2**20  # bytes, as in OpenEnv's own client


class RefusedAction(ValueError):
    """An action that does not have the form of the server's actions."""


class OpenEnv:
    """An episode on a server of OpenEnv, in a session of its own there.

    The prompt is the row's and the first observation. The policy writes an action in
    <action></action>, or as its whole response. An action that the server does not accept uses up a
    turn. Override `parts` to show observations in another way, and `action` for other actions.
    """

    def __init__(
        self,
        context: Context,
        url: str,
        field: str | None = None,
        text: Sequence[str] = (),
        images: Sequence[str] = (),
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the options.

        url: URL of the server, http://HOST:PORT.
        field: Field of the action that the policy's text becomes; without it, the policy writes the
            whole action as a JSON object.
        text: Fields of an observation that the policy reads; without them, all but `images`.
        images: Fields of an observation that hold an image in base64, or a list of them.
        reset: Arguments of a reset, besides the seed.
        """
        self._address = url.replace("http", "ws", 1).rstrip("/") + "/ws"
        self._chat, self._field = context.chat, field
        self._text, self._images, self._reset = text, images, reset or {}
        self._connection: ClientConnection | None = None

    async def check(self) -> None:
        """Raise ValueError if no server answers."""
        try:
            await self._connect()
        except (OSError, WebSocketException) as error:
            raise ValueError(
                f"environment.options.url: no server of OpenEnv answers at {self._address} "
                f"({error or type(error).__name__})"
            ) from error

    async def reset(self, row: Example, seed: int) -> Observation:
        await self._connect()
        found = await self._ask("reset", {**self._reset, "seed": seed})
        return opening(row, self.parts(found["observation"]))

    async def step(self, text: str) -> Step:
        try:
            action = self.action(written_action(text, self._chat))
            found = await self._ask("step", action)
        except RefusedAction as problem:
            return mistake(str(problem))
        reward = float(found["reward"] or 0.0)
        if found["done"]:
            return Step(None, reward, True)
        shown = Observation([{"role": "user", "content": self.parts(found["observation"])}])
        return Step(shown, reward, False)

    async def close(self) -> None:
        if self._connection is not None:
            with suppress(ConnectionClosed):
                await self._connection.send(json.dumps({"type": "close"}))
            await self._connection.close()

    def parts(self, observation: Mapping[str, Any]) -> list[str | Image]:
        """Return what the policy sees of an observation."""
        images = list[str | Image]()
        for name in self._images:
            found = observation[name] or []
            files = [found] if isinstance(found, str) else found
            images += [Image(base64.b64decode(file.rpartition(",")[2])) for file in files]
        if self._text:
            return [*images, "\n".join(map(_shown, (observation[name] for name in self._text)))]
        rest = {name: value for name, value in observation.items() if name not in self._images}
        return [*images, *([_shown(rest)] if rest else [])]

    def action(self, text: str) -> Mapping[str, Any]:
        """Return the action that the policy has written. Raises RefusedAction, whose message the
        policy reads, if there is none.
        """
        if self._field is not None:
            return {self._field: text}
        try:
            action = strict_json.decode(text)
        except (ValueError, RecursionError) as error:
            raise RefusedAction(f"the action is not JSON ({error})") from error
        if not isinstance(action, dict):
            raise RefusedAction("the action is not a JSON object")
        return action

    async def _connect(self) -> None:
        self._connection = await connect(self._address, max_size=_MAX_MESSAGE)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message, and return the observation that the server replies. Raises RefusedAction
        for an action without the form of the server's, and RuntimeError for another error.
        """
        assert self._connection is not None
        with suppress(ConnectionClosed):  # the reason may still have to be received
            await self._connection.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(await self._connection.recv())
        found: dict[str, Any] = reply["data"]
        if reply["type"] == "error":
            if kind == "step" and found.get("code") == "VALIDATION_ERROR":
                raise RefusedAction(_problems(found.get("errors", [])))
            raise RuntimeError(f"the server of OpenEnv failed: {found.get('message')}")
        return found


def _problems(errors: Sequence[Mapping[str, Any]]) -> str:
    found = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in errors]
    return f"the action is not accepted: {'; '.join(found)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
