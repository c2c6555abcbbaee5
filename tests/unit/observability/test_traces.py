"""Traces of several processes on one timeline."""

from typing import Any

from megavlm.observability.traces import joined


def _trace(base: int, start: float) -> dict[str, Any]:
    """Return a trace of a process 7 that launches a kernel on GPU 0."""
    return {
        "baseTimeNanoseconds": base,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "launch", "pid": 7, "tid": 1, "ts": start, "dur": 2.0},
            {"ph": "s", "name": "ac2g", "id": 5, "pid": 7, "tid": 1, "ts": start},
            {"ph": "f", "name": "ac2g", "id": 5, "pid": 0, "tid": 1, "ts": start + 1},
        ],
    }


def test_processes_with_equal_ids_stay_apart_on_one_clock() -> None:
    trace = joined({"rank_0": _trace(1_000_000, 10.0), "server_0": _trace(3_000_000, 10.0)})
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["rank_0", "rank_0", "server_0", "server_0"]
    launches = {names[e["pid"]]: e["ts"] for e in events if e["ph"] == "X"}
    assert launches == {"rank_0": 10.0, "server_0": 2010.0}, "microseconds after the first base"
    flows: dict[str, set[str]] = {}
    for event in events:
        if event["ph"] in "sf":
            flows.setdefault(event["id"], set()).add(names[event["pid"]])
    assert sorted(map(sorted, flows.values())) == [["rank_0"], ["server_0"]]
