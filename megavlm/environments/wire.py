"""Rows, observations and steps as messages between the trainer and processes of environments
(megavlm/subprocess_pool/wire.py).
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megavlm.environments.base import (
    ChatMessage,
    Content,
    Image,
    Observation,
    RecordedAction,
    Step,
)
from megavlm.rewards.base import Example, Score
from megavlm.subprocess_pool.failure import CallFailure


def unpack_row(values: Mapping[str, Any]) -> Example:
    return Example(**{**values, "images": tuple(values["images"]), "chat": tuple(values["chat"])})


def pack_observation(shown: Observation) -> dict[str, Any]:
    return {
        "messages": [_pack_message(message) for message in shown.messages],
        "images": list(shown.images),
        "tools": [dict(tool) for tool in shown.tools],
    }


def unpack_observation(values: Mapping[str, Any]) -> Observation:
    messages = [{**m, "content": _unpack_content(m["content"])} for m in values["messages"]]
    return Observation(messages, tuple(values["images"]), values["tools"])


def _pack_message(message: ChatMessage) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str):
        content = [p.data if isinstance(p, Image) else _text(p) for p in content]
    return {**message, "content": content}


def _unpack_content(content: Any) -> Content:
    if isinstance(content, str):
        return content
    return [Image(p) if isinstance(p, bytes) else p for p in content]


def _text(part: Any) -> str:
    if not isinstance(part, str):
        raise CallFailure(
            "value",
            f"a message's content has {part!r:.80}: give texts and images, with Image.of for a "
            "picture of Pillow or an array",
        )
    return part


def pack_step(step: Step) -> dict[str, Any]:
    """Encode a step. Of `info`, only the keys that the trainer reads are encoded."""
    info = {name: step.info[name] for name in ("correct", "parts", "counts") if name in step.info}
    if isinstance(score := step.info.get("score"), Score):
        info["score"] = asdict(score)
    for numbers in {"parts", "counts"} & info.keys():
        info[numbers] = {str(name): float(value) for name, value in info[numbers].items()}
    shown = None if step.observation is None else pack_observation(step.observation)
    return {
        "observation": shown,
        "reward": float(step.reward),
        "done": bool(step.done),
        "info": info,
        "actions": [action.values() for action in step.actions],
    }


def unpack_step(values: Mapping[str, Any]) -> Step:
    info = dict(values["info"])
    if "score" in info:
        info["score"] = Score(**info["score"])
    shown = values["observation"]
    observation = None if shown is None else unpack_observation(shown)
    actions = [RecordedAction(**action) for action in values["actions"]]
    return Step(observation, values["reward"], values["done"], info, actions)
