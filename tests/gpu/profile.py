"""Profile of one update: the kernels that take most of it, and how often the host waits.

python -m tests.gpu.profile
"""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megavlm.models.common.config import ModelOptions
from megavlm.parallel import platform
from tests.gpu import figures, model
from tests.gpu.lines import checking, report

SHOWN = 20
# Calls with which the host waits for the GPU.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::item")
ROOT = Path(__file__).parents[2]


def main() -> None:
    model.prepare()
    attention = "flash" if platform.has_gpu() else "sdpa"
    options = ModelOptions(dtype=torch.bfloat16, attention=attention)
    bench = figures.Bench(figures.config_of("3b"), options)
    bench.update()
    with checking("kernels"):
        report_kernels(bench)
    with checking("waits"):
        report_waits(bench)


def report_kernels(bench: figures.Bench) -> None:
    """Report the operations that take the most time, and the calls that wait."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * platform.has_gpu()
    with profile(activities=activities) as profiled:
        bench.update()
        platform.synchronize()
    events = profiled.key_averages()

    def seconds(event: Any) -> float:
        time = event.self_device_time_total if platform.has_gpu() else event.self_cpu_time_total
        return float(time) / 1e6

    total = sum(map(seconds, events)) or 1.0
    for event in sorted(events, key=seconds, reverse=True)[:SHOWN]:
        share = seconds(event) / total
        report(
            "kernel", name=event.key[:120], calls=event.count, seconds=seconds(event), share=share
        )
    calls = {event.key: event.count for event in events if event.key in WAITS}
    report("calls that wait", **calls)


def report_waits(bench: figures.Bench) -> None:
    """Report the lines of an update in which the host waits, by torch's own warnings."""
    if not platform.has_gpu():
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            bench.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = Counter(
        f"{_short(w.filename)}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)
    )
    for line, count in lines.most_common(SHOWN):
        report("wait", line=line, count=count)
    report("waits", count=sum(lines.values()))


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "/".join(path.parts[-3:])


if __name__ == "__main__":
    main()
