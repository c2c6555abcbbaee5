"""Process that has imported SGLang and is forked for each program (`forked_servers.py`).

    python -P sglang_forks.py PARENT_PID LISTENING_DESCRIPTOR

It imports SGLang on the first request. It ends with its parent. It kills a program as soon as the
process that asked for it has ended: the kernel does that for servers that are executed.
"""

import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).resolve().parents[2]))

from megavlm.families import FAMILIES
from megavlm.inference import server_main
from megavlm.inference.server_args import EAGLE3_MODULE
from tests.support.fork_start import forget_parent, run_and_exit, take_streams

hook: Any = sys.modules["sitecustomize"]  # of sglang_cpu
selector = selectors.DefaultSelector()


def import_sglang() -> None:
    """Import what servers import: SGLang, and its modules of all families and draft models."""
    importlib.import_module("sglang.srt.entrypoints.http_server")
    for name in sorted({EAGLE3_MODULE, *(x.served_modules for x in FAMILIES.values())}):
        hook.SERVED = [name]
        for folder in ("sglang.srt.models", "sglang.srt.multimodal.processors"):
            path = importlib.import_module(folder).__path__
            for module in pkgutil.iter_modules(path, f"{folder}."):
                importlib.import_module(module.name)


def fork_program(listener: socket.socket) -> None:
    """Fork a program for the next request. Its process id is the first answer; its exit status,
    when it has ended, is the second.
    """
    if "sglang" not in sys.modules:
        import_sglang()
    asked, _ = listener.accept()
    message, streams, _, _ = socket.recv_fds(asked, 2**20, 3)
    credentials = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    try:
        asker = os.pidfd_open(struct.unpack("3i", credentials)[0])
    except ProcessLookupError:  # it has ended while SGLang was imported
        asked.close()
        return
    program = os.fork()
    if program == 0:
        become_program(asked, json.loads(message), streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(program)

    def end() -> None:
        os.kill(program, signal.SIGKILL)  # changes nothing if it has ended
        _, status = os.waitpid(program, 0)
        for descriptor in (asker, ended):
            selector.unregister(descriptor)
            os.close(descriptor)
        with asked, suppress(BrokenPipeError):  # the asker has ended
            asked.send(str(status).encode())

    for descriptor in (asker, ended):
        selector.register(descriptor, selectors.EVENT_READ, end)


def become_program(asked: socket.socket, request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run the program in this fork."""
    import setproctitle

    try:
        os.setsid()
        setproctitle.setproctitle(" ".join(request["words"]))  # before the environment moves
        asked.send(str(os.getpid()).encode())
        take_streams(*streams)
        os.chdir(request["folder"])
        forget_parent(request["environment"])
        hook.SERVED = os.environ["MEGAVLM_SERVED_MODULES"].split(",")
        sys.argv = request["words"][2:]
        die_with = server_main.die_with  # its parent is this one, not the process that asked
        server_main.die_with = lambda parent, by: die_with(os.getppid(), by)
        is_server = sys.argv[0] == server_main.__file__
        run_and_exit(server_main.main if is_server else run_script)
    finally:
        os._exit(1)


def run_script() -> None:
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    parent = os.pidfd_open(int(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    selector.register(parent, selectors.EVENT_READ, sys.exit)
    selector.register(listener, selectors.EVENT_READ, lambda: fork_program(listener))
    while True:
        key, _ = selector.select()[0]  # alone, as it may close what the others are about
        key.data()


if __name__ == "__main__":
    main()
