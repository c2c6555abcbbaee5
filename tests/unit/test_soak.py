"""The soak and chaos runs: what growth is, the ledger, and the world of a run."""

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from megavlm.observability.records import write_records
from tests.e2e.conftest import World
from tests.soak.chaos import ROWS, STEPS, check_ledger
from tests.soak.growth import Sample, table, take_sample


def samples(slope: float) -> list[Sample]:
    """A measure that grows fast at the start, as memory does, and by `slope` a step later."""
    early = [Sample(step, {"memory_mb rank 0": 500.0 + 10 * step}) for step in range(50)]
    late = [
        Sample(50 + step, {"memory_mb rank 0": 1000.0 + slope * step + step % 3})
        for step in range(51)
    ]
    return [*early, *late]


def test_growth_of_the_second_half_alone_counts() -> None:
    assert table(samples(0.0))[1] == []
    assert table(samples(1.0))[1] == ["memory_mb rank 0"]


OPENS_FILES = """
import sys
print("started", flush=True)
sys.stdin.readline()
files = [open("/dev/null") for _ in range(8)]
print("opened", flush=True)
sys.stdin.readline()
"""


def test_a_sample_holds_what_a_process_holds(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_bytes(b"x" * 2**20)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", OPENS_FILES], stdin=PIPE, stdout=PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        before = take_sample(process.pid, tmp_path, 1).values
        print(file=process.stdin, flush=True)
        process.stdout.readline()
        after = take_sample(process.pid, tmp_path, 2).values
        print(file=process.stdin, flush=True)
    assert after["descriptors others"] - before["descriptors others"] == 8
    assert after["logs_mb all"] == 1.0


def write_ledger(folder: Path) -> list[dict[str, object]]:
    """Write the records of a run that trains on every row once an epoch. Returns its groups."""
    (folder / "samples").mkdir(exist_ok=True)
    steps = [{"step": step, "episodes": 16} for step in range(1, STEPS + 1)]
    rows = [(1 + i // 4, f"rows:{i % ROWS}") for i in range(4 * STEPS)]
    responses = [{"text": "\x85\u2028"}] * 4  # ends of lines for Python, and none of JSON
    groups = [{"step": step, "source": row, "responses": responses} for step, row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    write_groups(folder, groups)
    return groups


def write_groups(folder: Path, groups: list[dict[str, object]]) -> None:
    write_records(folder / "samples/rollouts.jsonl", groups)


def test_the_ledger_shows_gaps_and_doubles(tmp_path: Path) -> None:
    groups = write_ledger(tmp_path)
    check_ledger(tmp_path)
    write_groups(tmp_path, groups[:-1])
    with pytest.raises(AssertionError):
        check_ledger(tmp_path)
    write_groups(tmp_path, [*groups[:-1], {**groups[-1], "source": groups[-2]["source"]}])
    with pytest.raises(AssertionError, match="no gap and no double"):
        check_ledger(tmp_path)


def test_two_tests_do_not_share_a_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.recipe("mine")
    assert world.recipe("mine") == tmp_path / "mine.yaml", "a test may change its own recipe"
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/e2e/test_other.py::test_x (call)")
    with pytest.raises(AssertionError, match=r"test_two_tests_do_not_share.* has 'mine' too"):
        world.recipe("mine")
