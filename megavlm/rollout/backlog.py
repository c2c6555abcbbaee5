"""The backlog: groups that were started and not trained on, and their form in a checkpoint."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from megavlm.data.processor import Prompt
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.protocol import Response, VersionSpan
from megavlm.rollout.trajectory import Group


class TimedOutGroups:
    """Counts the groups of a step whose requests timed out, and drops them or keeps them for a
    later step (rollout.timed_out).
    """

    def __init__(self, handling: str, most: int) -> None:
        """most: Maximum groups of a step that may time out, equal to the groups that a step trains
        on.
        """
        self._handling, self._most = handling, most
        self._kept: list[Group] = []
        self._count = 0

    def add(self, group: Group) -> None:
        """Count a group. Raises RolloutServerError after too many."""
        self._count += 1
        if self._handling == "requeue":
            self._kept.append(Group(group.prompt))
        if self._count > self._most:
            raise RolloutServerError(
                f"the requests of {self._count} groups of a step timed out, more than the "
                f"algorithm.prompts_per_step={self._most} groups that it trains on: raise "
                "rollout.request_timeout, or lower rollout.concurrency, rollout.image_tokens or "
                "rollout.max_new_tokens; the run can resume from its last checkpoint"
            )

    def end_step(self) -> tuple[list[Group], dict[str, float]]:
        """Return the groups to be generated again by a later step, and the step's metrics."""
        kept, self._kept = self._kept, []
        count, self._count = self._count, 0
        return kept, {} if self._handling == "fail" else {"timed_out_groups": float(count)}


def group_state(group: Group, responses: Sequence[Response]) -> dict[str, Any]:
    """Return a group's row, step and first-turn responses as values of JSON."""
    return {
        "row": group.prompt.row.index,
        "step": group.step,
        "responses": [_values(response) for response in responses],
    }


def restored_group(values: Mapping[str, Any], prompt: Callable[[int], Prompt]) -> Group:
    """Return the group of a state; its episodes are started again. prompt: Function that returns
    the prompt of a row, by its index.
    """
    # Older checkpoints have no step for groups that were made within the step.
    responses = tuple(map(_response, values["responses"]))
    return Group(prompt(values["row"]), responses, step=values.get("step"))


def _values(response: Response) -> dict[str, Any]:
    """Return a response as values of JSON. Its arrays are bytes in base64, little endian."""
    return {
        "token_ids": base64.b64encode(response.token_ids.astype("<i4").tobytes()).decode(),
        "logprobs": base64.b64encode(response.logprobs.astype("<f4").tobytes()).decode(),
        "finish": response.finish,
        "weight_version": response.weight_version,
        "spans": [asdict(span) for span in response.spans],
    } | _route_values(response.routes)


def _route_values(routes: npt.NDArray[Any] | None) -> dict[str, Any]:
    if routes is None:
        return {}
    dtype = routes.dtype.newbyteorder("<")
    text = base64.b64encode(routes.astype(dtype).tobytes()).decode()
    return {"routes": {"values": text, "dtype": dtype.str, "shape": routes.shape}}


def _routes(values: Mapping[str, Any]) -> npt.NDArray[Any] | None:
    if "routes" not in values:
        return None
    routes = values["routes"]
    return _array(routes["values"], routes["dtype"]).reshape(routes["shape"])


def _array(values: str | Sequence[float], dtype: str) -> npt.NDArray[Any]:
    if not isinstance(values, str):  # older checkpoints have lists
        return np.array(values, dtype)
    return np.frombuffer(base64.b64decode(values), dtype).copy()  # bytes cannot be written


def _response(values: Mapping[str, Any]) -> Response:
    """Restore a response from its values in a state."""
    return Response(
        token_ids=_array(values["token_ids"], "<i4"),
        logprobs=_array(values["logprobs"], "<f4"),
        finish=values["finish"],
        weight_version=values["weight_version"],
        spans=tuple(VersionSpan(**span) for span in values["spans"]),
        routes=_routes(values),
    )
