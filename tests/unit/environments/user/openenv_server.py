"""A server of OpenEnv: `python openenv_server.py PORT [real]`.

With `real`, openenv-core serves the environment. Otherwise a stand-in sends the same messages,
because openenv-core 0.3.0 brings packages along that the lock file cannot have.
"""

import base64
import json
import random
import sys
from io import BytesIO
from typing import Any

import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from PIL import Image as Picture
from pydantic import BaseModel, ConfigDict, ValidationError

if "real" in sys.argv:
    from openenv.core.env_server import Action, Environment, Observation, create_fastapi_app
else:
    Environment = object

    class Action(BaseModel):
        model_config = ConfigDict(extra="forbid")

    class Observation(BaseModel):
        done: bool = False
        reward: float | None = None


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str
    view: str
    tries: int


class Guessing(Environment):
    """A number from 0 to 9, of the seed. The picture is as bright as the last guess."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    open = 0

    def __init__(self) -> None:
        super().__init__()
        Guessing.open += 1

    def reset(self, seed: int | None = None, highest: int = 9, **_: Any) -> Hint:
        self._number, self._tries = random.Random(seed).randint(0, highest), 0
        return self._hint("guess", 0, None)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._tries += 1
        if action.number == 99:
            raise RuntimeError("99 is too much")
        if action.number == 77:
            return self._hint(f"open: {Guessing.open}", 0, 0.0)
        if action.number == self._number:
            return self._hint("right", 0, 1.0, done=True)
        return self._hint(
            "higher" if action.number < self._number else "lower", action.number, -0.1
        )

    def close(self) -> None:
        Guessing.open -= 1

    @property
    def state(self) -> Any:
        return {}

    def _hint(self, hint: str, shade: int, reward: float | None, done: bool = False) -> Hint:
        file = BytesIO()
        Picture.new("L", (32, 32), shade).save(file, "PNG")
        view = base64.b64encode(file.getvalue()).decode()
        return Hint(hint=hint, view=view, tries=self._tries, reward=reward, done=done)


def stand_in() -> FastAPI:
    """Return what create_fastapi_app does, as far as episodes need it."""
    app = FastAPI()

    @app.websocket("/ws")
    async def serve(websocket: WebSocket) -> None:
        await websocket.accept()
        if Guessing.open >= 64:
            problem = {"message": "64 sessions are open", "code": "CAPACITY_REACHED"}
            await websocket.send_text(json.dumps({"type": "error", "data": problem}))
            await websocket.close()
            return
        environment = Guessing()
        try:
            while (message := json.loads(await websocket.receive_text()))["type"] != "close":
                await websocket.send_text(json.dumps(answer(environment, message)))
            await websocket.close()
        except WebSocketDisconnect:
            pass
        finally:
            environment.close()

    return app


def answer(environment: Guessing, message: dict[str, Any]) -> dict[str, Any]:
    try:
        if message["type"] == "reset":
            found = environment.reset(**message["data"])
        else:
            found = environment.step(Guess.model_validate(message["data"]))
    except ValidationError as error:
        problem = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
        errors = error.errors(include_url=False, include_context=False)
        return {"type": "error", "data": {**problem, "errors": errors}}
    except RuntimeError as error:
        return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
    shown = found.model_dump(exclude={"reward", "done"})
    data = {"observation": shown, "reward": found.reward, "done": found.done}
    return {"type": "observation", "data": data}


if __name__ == "__main__":
    if "real" in sys.argv:
        app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=64)
    else:
        app = stand_in()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
