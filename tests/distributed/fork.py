"""Runs a function on N gloo ranks by fork: torch and megatron are imported once, so a test pays 0.3
s, not torchrun's 6.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megavlm.parallel import platform

platform.install()


def launch(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 240
) -> list[Any]:
    """Results of `function(*args)` by rank. They travel by pickle: return plain values or small
    tensors.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        workers = [
            context.Process(
                target=_work,
                args=(rank, world_size, f"{folder}/store", pipes[rank][1], function, args),
            )
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        for _, sender in pipes:
            sender.close()
        try:
            results = []
            for rank, (receiver, _) in enumerate(pipes):
                if not receiver.poll(timeout):
                    raise TimeoutError(f"rank {rank} gave no result within {timeout} s")
                result, error = receiver.recv()
                if error:
                    raise RuntimeError(f"rank {rank} of {world_size}:\n{error}")
                results.append(result)
            for worker in workers:
                worker.join(timeout)
            return results
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _work(
    rank: int, world_size: int, store: str, sender: Any, function: Callable[..., Any], args: Any
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        answer: tuple[Any, str | None] = (result, None)
    except BaseException:
        answer = (None, traceback.format_exc())
    # As numbers, not through torch's shared memory, which dies with this process.
    sender.send(_plain(answer))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().copy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value
