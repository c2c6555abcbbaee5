"""Episodes that are played by an agent: a program that knows only the address of an API.

The gateway (megavlm/rollout/gateway) answers its requests as OpenAI's chat completions. What the
agent returns is scored: text by the configured reward; a number, or a mapping with `reward` and
optionally `correct` and `parts`, is the reward itself.
"""

import asyncio
import inspect
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image as Picture

from megavlm.environments.base import Context, Observation, Step, scored
from megavlm.import_path import import_object, import_of_key
from megavlm.process import die_with
from megavlm.rewards.base import Example
from megavlm.subprocess_pool.wire import json_bytes

GATEWAY = "gateway"  # environment.name
SHOWN_ERROR = 400  # characters of a command's errors that a failure shows


class Agent:
    """An agent, with the interface of Environment: `step` takes the address and runs the agent to
    its end.
    """

    def __init__(
        self,
        context: Context,
        agent: str | None = None,
        command: Sequence[str] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """Prepare an agent.

        agent: A Python function as package.module:name, called as agent(base_url, row), where `row`
            is an Example. It may be async.
        command: A program with its arguments. It finds OPENAI_BASE_URL and OPENAI_API_KEY in its
            environment, and the row as JSON on its standard input, with paths of its images.
        host: The gateway's address; read only by the gateway.
        """
        self._context, self._agent, self._command = context, agent, command
        self._resources = ExitStack()

    async def check(self) -> None:
        """Raise ValueError for options that name no agent."""
        where, agent, command = "environment.options", self._agent, self._command
        if (agent is None) == (command is None):
            raise ValueError(
                f"{where}: environment.name=gateway needs either {where}.agent, a function as "
                f"package.module:name, or {where}.command, a list of words"
            )
        if command is not None and not (
            isinstance(command, Sequence)
            and not isinstance(command, str)
            and command
            and all(isinstance(word, str) for word in command)
        ):
            raise ValueError(f"{where}.command={command!r} must be a list of words")
        if agent is not None:
            function = import_of_key(f"{where}.agent", agent)
            if not callable(function):
                raise ValueError(f"{where}.agent={agent} is not a function")

    async def reset(self, row: Example, seed: int) -> Observation:
        self._row = row
        return Observation(row.messages, row.images)

    async def step(self, text: str) -> Step:
        """Run the agent with the base URL `text`, and return its reward."""
        if self._command is None:
            assert self._agent is not None
            result = import_object(self._agent)(text, self._row)
            result = await result if inspect.isawaitable(result) else result
        else:
            result = _read(await self._run(self._command, text))
        if isinstance(result, str):
            return scored(await self._context.score(result, self._row))
        return reward_step(result)

    async def _run(self, command: Sequence[str], base_url: str) -> str:
        """Run a command and return its output. Raises RuntimeError if it fails."""
        folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory()))
        key = base_url.rstrip("/").split("/")[-2]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key},
            start_new_session=True,
            # It ends with the thread of the episode, also if this process is killed.
            preexec_fn=partial(die_with, os.getpid()),
        )
        self._resources.callback(_kill, process)
        row = json_bytes(_row_values(self._row, folder))
        printed, errors = await process.communicate(row)
        if process.returncode:
            shown = errors.decode(errors="replace").strip()[-SHOWN_ERROR:]
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {shown}")
        return printed.decode(errors="replace").strip()

    def close(self) -> None:
        """Kill the command, if it still runs, with its process group."""
        self._resources.close()


def reward_step(result: Any) -> Step:
    """Return the last step of an episode with the reward in `result`, a number or a mapping with
    `reward`. Raises ValueError for anything else.
    """
    values = dict(result) if isinstance(result, Mapping) else {"reward": result}
    reward = values.pop("reward", None)
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise ValueError(
            f"the agent's result {result!r:.80} is neither text to score nor a number "
            "nor a mapping with `reward`, and the agent has posted no reward"
        )
    if unknown := values.keys() - {"correct", "parts"}:
        raise ValueError(f"the agent's result has the unknown key {min(unknown)!r}")
    return Step(None, float(reward), True, values)


def _read(printed: str) -> Any:
    """Return what a command has printed: a JSON object with `reward`, or else text."""
    try:
        values = json.loads(printed)
    except ValueError:
        return printed
    return values if isinstance(values, dict) and "reward" in values else printed


def _row_values(row: Example, folder: Path) -> dict[str, Any]:
    """Write a row's images to a folder, and return the row as JSON values."""
    images = []
    for number, data in enumerate(row.images):
        with Picture.open(_file(folder / f"image_{number}", data)) as picture:
            suffix = (picture.format or "bin").lower()
        images.append(str((folder / f"image_{number}").rename(folder / f"image_{number}.{suffix}")))
    return {**row.columns(), "messages": list(row.messages), "images": images}


def _file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
