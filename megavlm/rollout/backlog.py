"""The backlog in a checkpoint: groups that were started and not trained on."""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megavlm.arrays import from_bytes, to_bytes
from megavlm.data.processor import Prompt
from megavlm.inference.protocol import Response, VersionSpan
from megavlm.rollout.recorded import ResponseReader, ResponseWriter
from megavlm.rollout.trajectory import Group


def backlog_state(groups: Sequence[Group]) -> bytes:
    """Return the row, step and first-turn responses of groups as a safetensors file."""
    written = ResponseWriter()
    records = [
        {
            "row": group.prompt.row.index,
            "step": group.step,
            "responses": [written.response(response) for response in group.responses],
        }
        for group in groups
    ]
    return to_bytes(written.arrays(), {"groups": records})


def restored_groups(
    state: bytes | Sequence[Mapping[str, Any]], prompt: Callable[[int], Prompt]
) -> list[Group]:
    """Return the groups of a state; their episodes are started again. prompt: Function that returns
    the prompt of a row, by its index.
    """
    if isinstance(state, bytes):
        arrays, values = from_bytes(state)
        records: Sequence[Mapping[str, Any]] = values["groups"]
        response: Callable[[Mapping[str, Any]], Response] = ResponseReader(arrays).response
    else:  # of the release before
        records, response = state, _old_response
    return [
        Group(prompt(record["row"]), tuple(map(response, record["responses"])), step=record["step"])
        for record in records
    ]


def _old_response(values: Mapping[str, Any]) -> Response:
    routed_experts = values.get("routes")
    return Response(
        token_ids=_old_array(values["token_ids"], "<i4"),
        logprobs=_old_array(values["logprobs"], "<f4"),
        finish=values["finish"],
        weight_version=values["weight_version"],
        spans=tuple(VersionSpan(**span) for span in values["spans"]),
        routed_experts=routed_experts
        and _old_array(routed_experts["values"], routed_experts["dtype"]).reshape(
            routed_experts["shape"]
        ),
    )


def _old_array(text: str, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype).copy()  # bytes cannot be written
