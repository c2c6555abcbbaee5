"""Rewards of groups, an environment that scores itself, and a reward that asks for turns."""

from collections.abc import Mapping, Sequence
from typing import Any

from megavlm.environments.base import Context, Observation, Step
from megavlm.rewards.base import Example


def rank(responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(sorted(responses).index(response)) for response in responses]


def place(responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return list(range(len(responses)))


def broken(responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    raise KeyError("as told")


def fails_for_four(response: str, row: Mapping[str, Any]) -> float:
    if response == "4":
        raise KeyError("as told")
    return 1.0


def by_turn(
    response: str,
    row: Mapping[str, Any],
    turns: Sequence[str],
    token_ids: Sequence[int],
    finish_reason: str,
) -> dict[str, Any]:
    assert turns[-1] == response
    parts = {"turns": len(turns), "tokens": sum(token_ids), "stop": finish_reason == "stop"}
    return {"reward": 0, "parts": parts}


class Own:
    """An environment that scores a response itself."""

    def __init__(self, context: Context) -> None:
        pass

    async def reset(self, row: Example, seed: int) -> Observation:
        return Observation(row.messages, row.images)

    async def step(self, text: str) -> Step:
        return Step(None, 0.25, True)


def of_two_numbers(responses: list[str], rows: list[Mapping[str, Any]]) -> list[float]:
    """Rewards differ where the answer is an odd number."""
    return [float(number * int(row["answer"]) % 2) for number, row in enumerate(rows)]
