"""One timeline of the traces that torch.profiler writes in several processes."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = ("process_name", "process_sort_index")  # events that say how a process is shown
FLOW = "sft"  # phases of events that belong together by their id, such as a launch and its kernel


def read_trace(path: Path) -> dict[str, Any]:
    """Return a trace in Chrome's format from a file that is compressed with gzip."""
    with gzip.open(path, "rt") as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace in Chrome's format for Perfetto."""
    with gzip.open(path, "wt", compresslevel=5) as file:
        json.dump(trace, file)


def joined(traces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join the traces of several processes in one. Their events are changed in place.

    traces: Traces in Chrome's format by the name under which a process is shown, in the order in
    which they are shown. Processes of several machines may have the same id, and GPUs have small
    numbers as ids, so that each gets a new one.
    """
    base = min((trace.get("baseTimeNanoseconds", 0) for trace in traces.values()), default=0)
    events: list[dict[str, Any]] = []
    processes: dict[tuple[int, Any], int] = {}
    for number, trace in enumerate(traces.values()):
        delay = (trace.get("baseTimeNanoseconds", 0) - base) / 1000  # microseconds
        for event in trace["traceEvents"]:
            if event["name"] in NAMES:
                continue  # torch.profiler calls all processes "python", and some it does not name
            key = number, event["pid"]
            event["pid"] = processes.setdefault(key, len(processes) + 1)
            if "ts" in event:
                event["ts"] += delay
            if event["ph"] in FLOW and "id" in event:
                event["id"] = f"{number}.{event['id']}"
            events.append(event)
    names = list(traces)
    for (number, own), process in processes.items():
        shown = names[number] if isinstance(own, int) else f"{names[number]} {own}"
        for name, value in zip(NAMES, ({"name": shown}, {"sort_index": process}), strict=True):
            events.append({"ph": "M", "name": name, "pid": process, "args": value})
    return {"traceEvents": events, "baseTimeNanoseconds": base, "displayTimeUnit": "ms"}
