"""A run in the terminal, while its files grow, are torn and replaced."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megavlm.cli import app
from megavlm.observability.metrics import METRICS_FILE
from megavlm.observability.watch import Tail, WatchedRun, view
from tests.unit.observability.runs import group, write_run


def shown(run: WatchedRun, now: float = 0.0, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    console.print(view(run, now))
    return console.export_text()


def watched(folder: Path, steps: int | None = None) -> WatchedRun:
    if steps is not None:
        (folder / "config.yaml").write_text(f"# By megavlm\nalgorithm:\n  steps: {steps}\n")
    run = WatchedRun(folder)
    run.read()
    return run


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    write_run(tmp_path, groups=[group("How\nmany?", texts=["\n2\nlines", "3\x1b[31m"])])
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    records = [json.loads(line) | {"time": 1000.0 + 60 * i} for i, line in enumerate(lines)]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(r) + "\n" for r in records))
    text = shown(watched(tmp_path, steps=65), now=1250.0)
    head = text.splitlines()[0]
    assert head == f"{tmp_path.name}: step 5 of 65, about 1 h 00 min left, last step 10.0 s ago"
    assert "Reward\n" in text and "┤" in text
    for words in (
        "mean of 5    phase    mean of 5  share",
        "memory, GiB",
        "Evaluation after 5 steps: greedy 90.0 %, sampled 77.0 %",
        "Step 5: How  (answer 2)",
        r"0  3\x1b[31m",
    ):
        assert words in text, words
    row = next(line for line in text.splitlines() if line.startswith("reward "))
    assert row.split()[:3] == ["reward", "0.500", "0.300"]
    assert row.split()[3:] == ["update", "1.0", "s", "50", "%"], "the longest phase"
    assert "no step for long" in shown(watched(tmp_path), now=1240 + 601)
    assert max(map(len, shown(watched(tmp_path), width=60).splitlines())) <= 60


def test_a_finished_run_and_one_without_a_step(tmp_path: Path) -> None:
    assert shown(watched(tmp_path, steps=3)) == f"{tmp_path.name}: step 0 of 3\n"
    write_run(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    assert shown(watched(tmp_path)).splitlines()[0] == f"{tmp_path.name}: step 5 of 3, finished"


def test_the_servers_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    healthy = {"url": "http://a:1", "state": "healthy", "seconds": 65.0, "version": "7"}
    away = {"url": "http://b:2", "state": "away", "seconds": 9.0, "version": None}
    rows = [
        healthy | {"queue": [12, 3], "restarts": 1, "reason": "it died"},
        away | {"queue": None, "restarts": 0, "reason": "gone for 300 s"},
    ]
    (tmp_path / "servers.json").write_text(json.dumps({"time": 1000.0, "servers": rows}))
    lines = shown(watched(tmp_path), now=1010.0).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("server "))
    assert lines[start].split() == "server state for weights running waiting restarts".split()
    assert lines[start + 1].split() == "http://a:1 healthy 1 min 05 s 7 12 3 1".split()
    assert lines[start + 2].split() == "http://b:2 away 9.0 s - - - 0".split()
    assert lines[start + 3] == "http://b:2: gone for 300 s" and "it died" not in "".join(lines)
    assert "servers are 1 min 00 s old" in shown(watched(tmp_path), now=1060.0)
    (tmp_path / "servers.json").unlink()
    assert "server " not in shown(watched(tmp_path))


def test_records_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}] and tail.is_new
    assert tail.read() == [] and not tail.is_new
    with path.open("a") as file:
        file.write('ep": 2}\n{"torn\n{"step": 3}\n')
    assert tail.read() == [{"step": 2}, {"step": 3}] and not tail.is_new
    new = tmp_path / "new"
    new.write_text('{"step": 1}\n' * 9)  # a resume writes the file anew, then it grows past
    new.replace(path)
    assert tail.read() == [{"step": 1}] * 9 and tail.is_new


def test_a_resumed_run_shows_no_step_twice(tmp_path: Path) -> None:
    write_run(tmp_path, steps=5)
    run = watched(tmp_path)
    records = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    new = tmp_path / "new"
    new.write_text("".join(json.dumps(r) + "\n" for r in records[:3]))
    new.replace(tmp_path / METRICS_FILE)
    run.read()
    assert [step for step, _ in run.curve] == [1, 2, 3] and run.step == 3


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    done: Any = CliRunner().invoke(app, ["watch", str(tmp_path)])
    assert done.exit_code == 0 and "step 5" in done.output
    refused: Any = CliRunner().invoke(app, ["watch", str(tmp_path / "samples")])
    assert isinstance(refused.exception, ValueError)
    assert "is not a run directory" in str(refused.exception)
