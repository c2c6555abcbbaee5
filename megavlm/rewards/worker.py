"""Process that runs reward functions: `python -m megavlm.rewards.worker CONTROL_FD`.

The process limits its own memory and processor time, reports which arguments its functions have,
and then answers one request at a time. Its standard output is a pipe; the trainer limits its size.
"""

import asyncio
import base64
import inspect
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from megavlm.limited.limits import has_children, limit, limit_cpu
from megavlm.limited.wire import frame, receive
from megavlm.rewards import registry


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(control)
    limit(setup["memory_bytes"], setup["parent"])
    # The import of the user's module may raise anything. An error ends the process, which reports
    # the reason.
    sys.excepthook = lambda kind, error, _: control.sendall(
        frame({"error": f"{kind.__name__}: {error}"})
    )
    functions = [registry.load_reward(name, options) for name, options in setup["rewards"]]
    sys.excepthook = sys.__excepthook__
    takes = [sorted(registry.arguments(function)) for function in functions]
    control.sendall(frame({"takes": takes}))
    while (request := receive(control)) is not None:
        limit_cpu(request["cpu_seconds"])
        reply = run_reward(functions[request["function"]], request)
        sys.stdout.flush()
        control.sendall(frame(reply | {"left_children": has_children()}))


def run_reward(function: registry.RewardFunction, request: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(request["options"])
    if request["images"] is not None:
        arguments["images"] = [base64.b64decode(image) for image in request["images"]]
    try:
        result = function(request["response"], request["row"], **arguments)
        return as_reply(asyncio.run(result) if inspect.iscoroutine(result) else result)
    except MemoryError:
        return {"failure": "memory", "message": "out of memory"}
    # The user's code may raise anything, including SystemExit.
    except BaseException as error:
        return {"failure": "exception", "message": f"{type(error).__name__}: {error}"[:500]}


def as_reply(result: Any) -> dict[str, Any]:
    """Return {reward, correct or None, parts} from the return value of a function."""
    if is_dataclass(result) and not isinstance(result, type):
        result = asdict(result)
    if not isinstance(result, Mapping):
        result = {"reward": result}
    correct = result.get("correct")
    return {
        "reward": float(result["reward"]),
        "correct": None if correct is None else bool(correct),
        "parts": {str(name): float(value) for name, value in result.get("parts", {}).items()},
    }


if __name__ == "__main__":
    main()
