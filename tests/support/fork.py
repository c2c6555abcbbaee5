"""Functions on N gloo ranks, forked from this process.

Ranks start with every package that this process has imported, and what one imports besides is
imported here for those that follow. So a rank costs 20 ms of CPU time, hardly more than one of a
pool that waits for work, and no test sees what another left behind.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.support.timeouts import scaled

GRACE = 5.0  # seconds
PACKAGES = sysconfig.get_path("purelib")


def launch(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 240
) -> list[Any]:
    """Results of `function(*args)` by rank. They travel by pickle: return plain values or small
    tensors. `timeout`: seconds, scaled.
    """
    timeout = scaled(timeout)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        workers, receivers = [], []
        for rank in range(world_size):
            # One after the other: a rank must not hold the sender of another, whose death would
            # then show only when both have ended.
            receiver, sender = context.Pipe(duplex=False)
            arguments = rank, world_size, f"{folder}/store", sender, function, args
            workers.append(context.Process(target=_work, args=arguments))
            workers[-1].start()
            sender.close()
            receivers.append(receiver)
        try:
            results = _results(receivers, timeout)
            for worker in workers:
                worker.join(timeout)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    _import(results[0][1])
    return [result for result, _ in results]


def _import(names: list[str]) -> None:
    """Import what a rank has imported, in its order."""
    for name in names:
        # An extension's inner modules come with it.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def _results(receivers: list[Connection], timeout: float) -> list[Any]:
    """By rank. A rank that fails ends the wait; what the others say within `GRACE` is told too, as
    the first to speak often only lost its connection to the one that failed.
    """
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while waiting := [r for r in range(len(receivers)) if r not in results.keys() | errors.keys()]:
        left = max(0.0, deadline - time.monotonic())
        ready = wait([receivers[rank] for rank in waiting], left)
        if not ready:
            break
        for rank in [rank for rank in waiting if receivers[rank] in ready]:
            try:
                result, error = receivers[rank].recv()
            except EOFError:
                result, error = None, "died without a word (killed, or out of memory?)"
            if error:
                errors[rank] = error
                deadline = min(deadline, time.monotonic() + GRACE)
            else:
                results[rank] = result
    if errors:
        told = "\n".join(f"rank {rank} of {len(receivers)}:\n{errors[rank]}" for rank in errors)
        raise RuntimeError(f"{told}\nno word from ranks {waiting}" if waiting else told)
    if waiting:
        raise TimeoutError(f"ranks {waiting} gave no result within {timeout} s")
    return [results[rank] for rank in range(len(receivers))]


def _work(
    rank: int, world_size: int, store: str, sender: Any, function: Callable[..., Any], args: Any
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    gc.freeze()  # collections leave out what this process shares with its parent
    known = set(sys.modules)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        answer: tuple[Any, str | None] = ((result, _packages(known)), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    # As numbers, not through torch's shared memory, which dies with this process.
    sender.send(_plain(answer))


def _packages(known: set[str]) -> list[str]:
    """Return the names of modules of installed packages that are not `known`, in their order."""
    return [
        name
        for name, module in sys.modules.items()
        if name not in known and (getattr(module, "__file__", None) or "").startswith(PACKAGES)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().copy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value
