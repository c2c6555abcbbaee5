"""Twenty seeded faults in fifty steps of a real run: it finishes, and trains on every sample once.

    make chaos SEED=0

Ranks, the rollout server and reward processes are killed, stood still or asked to stop at random
steps. Whenever the run ends with a code after which a batch script would start it again, it is
started again. The ledger is the record of the samples that each step trained on.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from megavlm.observability.records import read_records
from megavlm.process import ExitCode
from tests.soak.growth import kind_of
from tests.soak.run import PROMPTS, RESPONSES, command, start, steps_done

STEPS, FAULTS = 50, 20
ROWS = 48  # of the world's training file: an epoch is 12 steps
AGAIN = (ExitCode.STOPPED, ExitCode.TRANSIENT, ExitCode.HUNG, 128 + signal.SIGKILL)
KINDS = ("kill server", "still server", "kill rank", "ask rank", "kill reward")
STILL = 3.0  # seconds


def victims(run: "subprocess.Popen[bytes]", kind: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        try:
            words, part = " ".join(process.cmdline()), kind_of(process)
        except psutil.Error:
            continue
        is_server = "server_main.py" in words if kind == "kill server" else part == "server"
        if (
            (kind.endswith("server") and is_server)
            or (kind.endswith("rank") and part.startswith("rank"))
            or (kind.endswith("reward") and "rewards.worker" in words)
        ):
            found.append(process)
    return found


def strike(run: "subprocess.Popen[bytes]", kind: str, rng: random.Random) -> bool:
    """Make a fault. Returns False if there is nothing that it could strike."""
    found = victims(run, kind)
    if not found:
        return False
    try:
        if kind == "still server":
            for process in found:
                process.suspend()
            time.sleep(STILL)
            for process in found:
                process.resume()
        else:
            victim = found[0] if kind == "kill server" else rng.choice(found)
            victim.send_signal(signal.SIGUSR1 if kind == "ask rank" else signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False  # the run ends already, of the fault before
    return True


def chaos(root: Path, seed: int) -> tuple[Counter[str], Counter[int]]:
    """Return how often each fault was made, and how often the run ended with each exit code."""
    rng = random.Random(seed)
    due = sorted(rng.sample(range(1, STEPS), FAULTS))
    kinds = [rng.choice(KINDS) for _ in due]
    words = command(
        root,
        "chaos",
        STEPS,
        rollout={"max_restarts": FAULTS, "max_new_tokens": 16},
        checkpoint={"every": 2},
        data={"pack_tokens": 1024},
    )
    made: Counter[str] = Counter()
    codes: Counter[int] = Counter()
    metrics = root / "chaos/metrics.jsonl"
    with (root / "output.txt").open("a") as output:
        while not codes[ExitCode.DONE]:
            run = start(words, output)
            before = steps_done(metrics)
            while run.poll() is None:
                time.sleep(0.05)
                # After a step of this start, so that signals find a run that trains.
                done = steps_done(metrics)
                if due and done > before and done >= due[0] and strike(run, kinds[0], rng):
                    made[kinds[0]] += 1
                    print(f"step {due.pop(0)}: {kinds.pop(0)}", flush=True)
                before = min(before, done)
            codes[run.returncode] += 1
            text = (root / "output.txt").read_text()
            assert run.returncode in (ExitCode.DONE, *AGAIN), text[-5000:]
    assert not due, f"faults that were not made: {due}"
    return made, codes


def check_ledger(folder: Path) -> None:
    """Check that each step is recorded once, and each row trained on once an epoch."""
    steps = read_records(folder / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["episodes"] == PROMPTS * RESPONSES for step in steps)
    epochs: Counter[tuple[int, str]] = Counter()
    groups: Counter[int] = Counter()
    for record in read_records(folder / "samples/rollouts.jsonl"):
        assert len(record["responses"]) == RESPONSES
        groups[record["step"]] += 1
        epochs[(record["step"] - 1) * PROMPTS // ROWS, record["source"]] += 1
    assert set(groups.values()) == {PROMPTS} and len(groups) == STEPS
    assert set(epochs.values()) == {1}, "no gap and no double"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        started = time.monotonic()
        made, codes = chaos(root, int(sys.argv[1]))
        check_ledger(root / "chaos")
    ends = {int(code): count for code, count in codes.items()}
    print(f"{dict(made)}, ends by exit code {ends}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
