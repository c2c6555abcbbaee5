"""Rewards that a user might write, faulty ones among them; loaded in reward processes."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SINK: list[bytearray] = []


def length(response: str, row: Mapping[str, Any], factor: float = 1.0) -> float:
    return factor * len(response) / len(row["answer"])


def looks(response: str, row: Mapping[str, Any], images: Sequence[bytes]) -> dict[str, Any]:
    return {"reward": 0.5, "correct": response == images[0].decode(), "parts": {"seen": 1}}


def anything(response: str, row: Mapping[str, Any], /, **options: float) -> float:
    return sum(options.values())


async def later(response: str, row: Mapping[str, Any]) -> float:
    return 1.0


class Later:
    async def __call__(self, response: str, row: Mapping[str, Any]) -> float:
        return 1.0


LATER = Later()


def tolerant(response: str, row: Mapping[str, Any], tolerance: float = 1.0) -> float:
    return tolerance


def asks(
    response: str,
    row: Mapping[str, Any],
    finish_reason: str,
    turns: Sequence[str],
    token_ids: Sequence[int],
) -> dict[str, Any]:
    asked = {"turns": len(turns), "last": turns[-1] == response, "tokens": sum(token_ids)}
    return {"reward": finish_reason == "length", "parts": asked}


def ranks(
    responses: Sequence[str], rows: Sequence[Mapping[str, Any]], step: float = 1.0
) -> list[float]:
    """Rank responses of the same row by their text, from 0."""
    assert all(row == rows[0] for row in rows) and len(rows) == len(responses)
    return [step * sorted(responses).index(response) for response in responses]


async def asks_of_a_group(
    *,
    rows: Sequence[Mapping[str, Any]],
    responses: Sequence[str],
    images: Sequence[Sequence[bytes]],
    finish_reason: Sequence[str],
    turns: Sequence[Sequence[str]],
    token_ids: Sequence[Sequence[int]],
) -> list[dict[str, Any]]:
    return [
        {"reward": 1, "parts": {"turns": len(said), "tokens": sum(ids), "cut": end == "length"}}
        | {"correct": shown == [rows[0]["answer"].encode()]}
        for said, ids, end, shown in zip(turns, token_ids, finish_reason, images, strict=True)
    ]


def faulty_group(responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
    """Does what the first response says."""
    match responses[0]:
        case "short":
            return [1.0]
        case "number":
            return 1.0
        case "mapping":
            return {response: 1.0 for response in responses}
        case "text":
            return ["good"] * len(responses)
        case "infinite":
            return [float("inf"), *[1.0] * (len(responses) - 1)]
        case "raise":
            raise KeyError("as told")
    return [1.0] * len(responses)


def both(response: str, row: Mapping[str, Any], responses: Sequence[str]) -> float:
    return 0.0


def half(responses: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    return [0.0] * len(responses)


def faulty(response: str, row: Mapping[str, Any]) -> Any:
    """Does what the response says."""
    match response:
        case "loop":
            re.fullmatch(r"(a+)+b", "a" * 60)  # needs exponential time, and holds Python's lock
        case "sleep":
            time.sleep(1000)
        case "mark and sleep":
            Path(row["mark"]).touch()
            time.sleep(1000)
        case "allocate":
            SINK.append(bytearray(4 * 2**30))
        case "fork":
            if os.fork() == 0:
                time.sleep(1000)
            time.sleep(1000)
        case "leave a child":
            if os.fork() == 0:
                time.sleep(1000)
        case "leave a daemon":
            seconds = f"1000.{os.getppid()}"  # by which the test that waits knows it
            subprocess.Popen(["/bin/sleep", seconds], start_new_session=True)
        case "hide":  # a grandchild in a session of its own, whose parent is gone
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(1000)
                os._exit(0)
            time.sleep(1000)
        case "flood":
            while True:
                os.write(1, b"x" * 4096)
        case "print":
            print("x" * 5000)
        case "raise":
            raise KeyError("as told")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
        case "nan":
            return float("nan")
        case "infinite":
            return float("inf")
        case "huge":
            return 10**400
        case "text":
            return "good"
        case "nothing":
            return None
        case "environment":
            return {"reward": 1, "parts": {name: 1 for name in os.environ}}
        case "pid":
            return os.getpid()
        case "mask":
            assert row["mask"] == b"\x89PNG\x00\xff" and row["deep"] == [{"bytes": row["mask"]}]
    return 1
