"""On PYTHONPATH of launched ranks: `megavlm.run.train` replaced by the ends a run can have.

The run's seed chooses the end; see test_launcher.py.
"""

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

from megavlm.process import STOP_SIGNALS


def train(config: Any, progress: Any) -> bool:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    if config.run.seed == 1:
        raise ValueError("every rank refuses this")
    elif config.run.seed == 2:
        dist.init_process_group("gloo")
        if rank == 1:
            raise ValueError("only rank 1 refuses this")
        dist.barrier()
    elif config.run.seed == 3:
        raise ZeroDivisionError("a fault of ours")
    elif config.run.seed == 5:
        from megavlm.inference.errors import RolloutServerError

        raise RolloutServerError("the server did not start\nits last words")
    elif config.run.seed in (4, 10, 11):  # works for ever, with a process that hides in a session
        if config.run.seed == 10:  # and stops only between two steps
            for number in STOP_SIGNALS:
                signal.signal(number, lambda *_: None)
        if config.run.seed == 11:
            server = start_server()  # noqa: F841  it ends when its input is closed
        hidden = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # noqa: S607
        dist.init_process_group("gloo")
        (folder / f"pids-{rank}").write_text(f"{os.getpid()} {hidden.pid}")
        dist.barrier()
        if rank == 0:
            print("working", flush=True)
        while True:
            dist.barrier()
    elif config.run.seed == 6:  # the first start is asked to stop in a step, another one completes
        if (folder / f"saved-{rank}").exists():
            return True
        asked: list[int] = []
        for number in STOP_SIGNALS:
            signal.signal(number, lambda caught, _: asked.append(caught))
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 0:
            print("working", flush=True)
        while not asked:
            time.sleep(0.01)
        time.sleep(float(os.environ["STEP_SECONDS"]))
        (folder / f"saved-{rank}").touch()
        return False
    elif config.run.seed in (8, 9):
        hang(config, rank, holds_interpreter=config.run.seed == 9)
    elif config.run.seed == 7:  # a server is killed, and starts again on its node
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 0:
            restart_servers(config.rollout.urls)
            (folder / "restarted").write_text(" ".join(config.rollout.urls))
        dist.barrier()
    return True


def hang(config: Any, rank: int, *, holds_interpreter: bool) -> None:
    """Hang on rank 1, in a call of C, while rank 0 waits for it in a collective."""
    import ctypes
    from functools import partial
    from types import SimpleNamespace

    import torch.distributed as dist

    from megavlm.observability.phases import Phases
    from megavlm.parallel.mesh import own_store
    from megavlm.parallel.watchdog import Watchdog
    from megavlm.process import STACKS, ExitCode
    from megavlm.run.exit_reason import end_run

    dist.init_process_group("gloo")
    if config.rollout.urls:
        wait_for_servers(config.rollout.urls)
    dist.barrier()
    phases = Phases()
    with Watchdog(
        config.run.watchdog,
        phases,
        Path(config.run.dir, STACKS),
        partial(end_run, code=ExitCode.HUNG),
        store=own_store(),
        rank=rank,
        world_size=dist.get_world_size(),
    ) as watchdog:
        if rank == 0:
            watchdog.servers = SimpleNamespace(work_seen=0, write_stacks=lambda: None)
        with phases("vision"):
            dist.barrier()
        with phases("update"):
            if rank == 1:
                time.sleep(config.run.watchdog / 2)  # until the watchdog has set its timer
                library = ctypes.PyDLL(None) if holds_interpreter else ctypes.CDLL(None)
                library.sleep(1000)
            dist.barrier()


def start_server() -> "subprocess.Popen[bytes]":
    """Start a rollout server's first process, which waits for its keys, and its reaper."""
    import tempfile

    import psutil

    from megavlm.inference.server_process import SERVER_MAIN

    server = subprocess.Popen(
        [sys.executable, "-P", str(SERVER_MAIN), str(os.getpid())],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": tempfile.mkdtemp(prefix="megavlm-rollout-")},
        start_new_session=True,
    )
    while not psutil.Process(server.pid).children():
        time.sleep(0.01)
    return server


def restart_servers(urls: list[str]) -> None:
    import psutil

    wait_for_servers(urls)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        address = urls[0].removeprefix("http://").split(":")
        if "server_main.py" in " ".join(words) and {*address} <= {*words}:
            process.kill()
            process.wait()
    wait_for_servers(urls)


def wait_for_servers(urls: list[str]) -> None:
    import httpx

    key = {"Authorization": f"Bearer {os.environ['MEGAVLM_ROLLOUT_API_KEY']}"}
    for url in urls:
        while True:
            try:
                httpx.get(f"{url}/server_info", headers=key).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)


# No program of these does its work here, so megatron-core is not imported: half of a rank's start.
for name, functions in {
    "train": {"train": train},
    "evaluate": {"evaluate_models": None},
    "rollout": {"record_rollouts": None},
}.items():
    module = types.ModuleType(f"megavlm.run.{name}")
    vars(module).update(functions)
    sys.modules[module.__name__] = module
if "RANK" in os.environ:
    from megavlm.parallel import platform

    platform.install = lambda: None
