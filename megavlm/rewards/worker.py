"""Process that runs reward functions: `python -m megavlm.rewards.worker CONTROL_FD`.

The process limits its own memory and processor time, reports which arguments its functions have,
and then answers one request at a time. Its standard output is a pipe; the trainer limits its size.
"""

import asyncio
import inspect
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from megavlm.rewards import registry
from megavlm.subprocess_pool.limits import has_children, limit, limit_cpu
from megavlm.subprocess_pool.wire import frame, receive


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(control)
    limit(setup["memory_bytes"], setup["parent"])
    # The import of the user's module may raise anything. An error ends the process, which reports
    # the reason.
    sys.excepthook = lambda kind, error, _: control.sendall(
        frame({"error": f"{kind.__name__}: {error}"})
    )
    functions = [registry.load_reward(*reward) for reward in setup["rewards"]]
    sys.excepthook = sys.__excepthook__
    takes = [registry.arguments(function) for function in functions]
    control.sendall(frame({"takes": [asdict(found) for found in takes]}))
    while (request := receive(control)) is not None:
        limit_cpu(request["cpu_seconds"])
        index = request["function"]
        reply = run_reward(functions[index], takes[index].is_group, request)
        sys.stdout.flush()
        control.sendall(frame(reply | {"left_children": has_children()}))


def run_reward(
    function: registry.RewardFunction, is_group: bool, request: Mapping[str, Any]
) -> dict[str, Any]:
    """Return {scores}, one for each response of the request, or the failure of the function."""
    responses, row, context = request["responses"], request["row"], request["context"]
    if "images" in context:
        context["images"] = [context["images"]] * len(responses)
    try:
        if is_group:
            rows = [dict(row) for _ in responses]
            result = function(responses=responses, rows=rows, **context, **request["options"])
        else:
            alone = {name: values[0] for name, values in context.items()}
            result = function(responses[0], row, **alone, **request["options"])
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        results = as_list(result, len(responses)) if is_group else [result]
        return {"scores": [as_reply(result) for result in results]}
    except MemoryError:
        return {"failure": "memory", "message": "out of memory"}
    # The user's code may raise anything, including SystemExit.
    except BaseException as error:
        return {"failure": "exception", "message": f"{type(error).__name__}: {error}"[:500]}


def as_list(result: Any, count: int) -> list[Any]:
    """Return the values that a reward of a group returned for its `count` responses. Raises
    ValueError if there is not one for each.
    """
    is_list = isinstance(result, Iterable) and not isinstance(result, str | Mapping)
    values = list(result) if is_list else None
    if values is None or len(values) != count:
        shown = f"{result!r:.50}" if values is None else f"{len(values)} values"
        raise ValueError(
            f"it returned {shown} for a group of {count} responses: return a list with one score "
            "for each"
        )
    return values


def as_reply(result: Any) -> dict[str, Any]:
    """Return {reward, correct or None, parts} from the return value of a function."""
    if is_dataclass(result) and not isinstance(result, type):
        result = asdict(result)
    if not isinstance(result, Mapping):
        result = {"reward": result}
    correct = result.get("correct")
    return {
        "reward": _number(result["reward"]),
        "correct": None if correct is None else bool(correct),
        "parts": {str(name): _number(value) for name, value in result.get("parts", {}).items()},
    }


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"it returned {value!r:.50}, but that is not a number: return a number, or a mapping "
            "with the number `reward`"
        ) from None


if __name__ == "__main__":
    main()
