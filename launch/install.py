"""Install lock files into a virtual environment: PYTHON launch/install.py LOCK [LOCK ...]

A later file replaces pins of the earlier ones.

Uses uv where it is found, otherwise several pip processes side by side. Nothing is compiled to byte
code ahead: Python compiles what it imports. Prints what is installed, what takes the space and how
long it took. Exits with the installer's status if a package cannot be installed.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
LARGE = ("torch", "triton", "sglang")  # hundreds of MB each: they start first
BATCH = 12  # packages per pip process, which takes a second to start
SHOWN = 8


def main(locks: Sequence[Path]) -> int:
    """Install the packages of `locks` and return the exit status."""
    started = time.monotonic()
    pins = read(locks)
    uv = shutil.which("uv")
    done = 0
    print(f"Installing {len(pins)} packages with {'uv' if uv else 'pip'}", flush=True)
    with ThreadPoolExecutor(max_workers=max(os.cpu_count() or 1, 2)) as pool:
        jobs = {
            pool.submit(subprocess.run, command, capture_output=True, text=True): count
            for command, count in commands(pins, uv)
        }
        for job in as_completed(jobs):
            if job.result().returncode:
                pool.shutdown(cancel_futures=True)
                print(job.result().stderr.rstrip(), file=sys.stderr)
                return job.result().returncode
            done += jobs[job]
            print(f"  {done}/{len(pins)}  {time.monotonic() - started:.0f} s", flush=True)
    sizes = sorted(((size(pin.split("==")[0]), pin) for pin in pins), reverse=True)
    largest = ", ".join(f"{pin} {megabytes} MB" for megabytes, pin in sizes[:SHOWN])
    print(f"{sum(megabytes for megabytes, _ in sizes)} MB: {largest}, and others", flush=True)
    return 0


def read(locks: Sequence[Path]) -> list[str]:
    """Return the pins, NAME==VERSION; of a package that several files pin, the last one's."""
    lines = [line for lock in locks for line in lock.read_text().splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    return list({pin.split("==")[0]: pin for pin in pins}.values())


def commands(pins: Sequence[str], uv: str | None) -> list[tuple[list[str], int]]:
    """Return the installers' commands, each with its number of packages.

    pip always installs torch: where a machine provides a build without CUDA, pip's configuration
    names it, which uv does not read.
    """
    ordered = sorted(pins, key=lambda pin: pin.split("==")[0] not in LARGE)
    large = [pin for pin in ordered if pin.split("==")[0] in LARGE]
    pip = [*PIP, "--no-deps", "--no-compile"]
    if uv:
        torch = [pin for pin in pins if pin.startswith("torch==")]
        others = [pin for pin in pins if pin not in torch]
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps"]
        return [([*command, *others], len(others)), ([*pip, *torch], len(torch))]
    rest = ordered[len(large) :]
    batches = [[pin] for pin in large] + [rest[i : i + BATCH] for i in range(0, len(rest), BATCH)]
    return [([*pip, *batch], len(batch)) for batch in batches]


def size(package: str) -> int:
    """Return the megabytes of an installed package's files."""
    files = importlib.metadata.distribution(package).files or []
    paths = (Path(file.locate()) for file in files)
    return sum(path.stat().st_size for path in paths if path.exists()) // 2**20


if __name__ == "__main__":
    sys.exit(main([Path(lock) for lock in sys.argv[1:]]))
