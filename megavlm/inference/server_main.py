"""Main module of a server's first process. It runs stock SGLang, keeps the keys off the command
line, and leaves no orphan processes.

    echo '{"api_key": ..., "admin_api_key": ...}' | python -P server_main.py PARENT_PID [ARGUMENTS]

It uses only the standard library until SGLang starts. The keys come over standard input, so they
are in no argument list, environment or file, and log records are redacted. When the parent dies for
any reason, the kernel kills this process. A reaper process, forked before anything else, then kills
the rest of the process group: SGLang's workers, even if they are still starting.
"""

import atexit
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Iterable
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK_EVERY = 2.0  # seconds between the reaper's checks
SHARED_MEMORY = "/dev/shm/sgl"  # noqa: S108  begin of the names of SGLang's files
LOADER = "megavlm_weights.receive"  # of server_support
# Listed with the loader, so that /server_info tells that the server takes videos. No weights are
# loaded by it.
VIDEOS = "megavlm_videos.processed"


def die_with(parent: int, by: signal.Signals) -> None:
    """Ask the kernel to send `by` to this process when its parent, process `parent`, dies."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(by)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), by)


def ignore_signals() -> None:
    """Ignore, in this process and its children, the signals that Slurm sends to every process of a
    job. The trainer still needs its servers to finish the step, and it ends them itself.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def fork_reaper() -> None:
    """Fork a child that removes TMPDIR and kills the process group once this process is gone. It
    lists the group's shared memory while this process lives, because SGLang's workers may end with
    it.
    """
    main = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if os.fork() == 0:
        die_with(main, by=signal.SIGTERM)
        files: set[str] = set()
        while os.getppid() == main:  # SIGTERM may come from another process
            files = set(filter(os.path.exists, files)) | shared_memory_of(os.getpgid(0))
            signal.sigtimedwait({signal.SIGTERM}, LOOK_EVERY)
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
        remove(files | shared_memory_of(os.getpgid(0)))
        os.killpg(0, signal.SIGKILL)


def shared_memory_of(group: int | None) -> set[str]:
    """Return SGLang's files in shared memory that processes of a process group have mapped, or that
    its first process has created and not removed. With None, consider all processes. SGLang leaves
    these files behind when it is killed.
    """
    found: set[str] = set()
    folder, begin = os.path.split(SHARED_MEMORY)
    for name in os.listdir(folder):
        maker = name.split("_")[-2:][0]  # sgl_shm_<kind>_<pid>_<random>
        if name.startswith(begin) and maker.isdecimal():
            if os.path.exists(f"/proc/{maker}") if group is None else int(maker) == group:
                found.add(f"{folder}/{name}")
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if group is None or os.getpgid(int(pid)) == group:
                with open(f"/proc/{pid}/maps") as maps:
                    lines = (line.rstrip() for line in maps if SHARED_MEMORY in line)
                    found |= {line.split()[-1] for line in lines if line[-1] != ")"}  # (deleted)
        except OSError:
            pass  # the process has ended, or belongs to another user
    return found


def remove(files: Iterable[str]) -> None:
    for file in files:
        try:
            os.unlink(file)
        except OSError:
            pass  # SGLang has already removed it


def obey_only(parent: int) -> None:
    """Accept SIGTERM from `parent` only. The signal is already blocked, and new threads inherit
    this.
    """

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)  # now delivered, so SGLang's handler runs

    threading.Thread(target=wait, daemon=True).start()


def redact(secrets: list[str]) -> None:
    """Redact `secrets` in every log record of this process, because SGLang logs all its
    arguments.
    """
    make = logging.getLogRecordFactory()

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        text = record.getMessage()
        if any(secret in text for secret in secrets):
            for secret in secrets:
                text = text.replace(secret, "***")
            record.msg, record.args = text, None
        return record

    logging.setLogRecordFactory(factory)


def main() -> None:
    parent = int(sys.argv[1])
    die_with(parent, by=signal.SIGKILL)
    ignore_signals()
    fork_reaper()
    obey_only(parent)
    keys = json.loads(sys.stdin.readline())
    redact(list(keys.values()))
    # Unlike the process's argument list, this list is not visible to other users.
    sys.argv = ["sglang.launch_server", *sys.argv[2:]]
    # SGLang's ranks are spawned with this sys.path, and import the megavlm weight loaders from
    # there. The folder of the package itself comes last.
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path += [os.path.join(folder, "server_support"), os.path.dirname(os.path.dirname(folder))]
    sys.argv += ["--custom-weight-loader", LOADER, VIDEOS]
    sys.argv += ["--api-key", keys["api_key"], "--admin-api-key", keys["admin_api_key"]]
    # Import without garbage collection, which is faster; see megavlm/process.py.
    atexit.register(gc.unfreeze)
    gc.disable()
    importlib.import_module("sglang.srt.entrypoints.http_server")
    for support in ("megavlm_images", "megavlm_prompts", "megavlm_videos"):
        importlib.import_module(support).install()
    gc.freeze()
    gc.enable()
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
