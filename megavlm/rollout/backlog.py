"""The form of the backlog in a checkpoint: groups that were started and not trained on."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from megavlm.data.processor import Prompt
from megavlm.inference.protocol import Response, VersionSpan
from megavlm.rollout.trajectory import Group


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
