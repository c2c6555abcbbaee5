"""Weight loaders that run inside SGLang's ranks, so that each rank gets only the slices that it
stores.

SGLang calls them by their names in `--custom-weight-loader`. SGLang's `load_format=direct` does the
same for whole parameters in `update_weights_from_tensor`. These loaders also accept parts of a
stack of experts, and slices from a process group; SGLang's `update_weights_from_distributed`
accepts only whole tensors. Besides the standard library, this module imports only torch.

A rank gets one pair: a JSON text and a tensor. The text describes a flat tensor by `dtype`; by
`slices`, [name or name[first row:end], shape] of each part of a parameter; by `whole`, [HF name,
shape] of each tensor that the model's own loader must cut; and by `file` if the content is in that
file. The file is mapped and not copied, and the pair's own tensor is empty then.
"""

import json
import logging
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_ROWS = re.compile(r"(.+)\[(\d+):(\d+)\]")
POLL = 0.02  # seconds between checks of the trainer's store
GRACE = 5.0  # seconds for a thread to end after its groups were left
_groups: dict[str, dist.ProcessGroup] = {}
# Connections to the trainer's store, by the token of the groups and their use. They are kept as
# long as the groups, because torch resolves host names for each new connection, on both sides.
_stores: dict[tuple[str, str], dist.TCPStore] = {}

logger = logging.getLogger(__name__)


def load_slices(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load the slices and tensors in the flat tensor."""
    ((text, flat),) = named_tensors
    described = json.loads(text)
    if "file" in described:
        path, dtype = described["file"], getattr(torch, described["dtype"])
        flat = torch.from_file(path, size=Path(path).stat().st_size // dtype.itemsize, dtype=dtype)
    _load(model, described, flat)


def receive_slices(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Receive flat tensors, each broadcast by one trainer rank in a separate group, and load them.
    All are received at the same time.

    The text has `receive`, a list of [group, rank in it, size, description] per tensor; `host`,
    `port`, `backend`, `timeout` in seconds; `token`, the prefix of the groups in use; and two keys
    of the store at that address. This rank sets `answer` to "" or its error; any rank sets `fault`
    as soon as it fails. Nothing is raised, because an exception would end SGLang's process.
    """
    task = json.loads(named_tensors[0][0])
    try:
        store = _connect(task, "answers")
        # In a thread, because a broadcast hangs if another rank has died.
        results: list[str] = []
        arguments = (_receive, model, task, torch.is_inference_mode_enabled(), results)
        work = Thread(target=copy_context().run, args=arguments, daemon=True)
        work.start()
        gave_up = False
        while work.is_alive() and not gave_up:
            work.join(POLL)
            gave_up = store.check([task["fault"]])
        if not results:
            _leave("")
            work.join(GRACE)
        answer = results[0] if results else "" if gave_up else "its thread ended"
        store.set(task["answer"], answer)
        if answer:
            store.set(task["fault"], answer)
    except RuntimeError as error:  # the trainer has died
        logger.warning("weights were not received: %r", error)
        _leave("")


def join(
    store: dist.Store,
    name: str,
    rank: int,
    size: int,
    backend: str,
    timeout: timedelta,
    description: str | None = None,
) -> dist.ProcessGroup:
    """Join a process group in addition to the default one, as SGLang's `init_custom_process_group`
    does. description: Text that torch's flight recorder has for the group.
    """
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
        group_desc=description,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _connect(task: dict[str, Any], use: str) -> dist.TCPStore:
    """Return the connection to the trainer's store for a use. Waiting blocks a connection for all
    its users, so each use has its own.
    """
    key = task["token"], use
    if key not in _stores:
        limit = timedelta(seconds=task["timeout"])
        _stores[key] = dist.TCPStore(task["host"], task["port"], is_master=False, timeout=limit)
    return _stores[key]


def _receive(model: Any, task: dict[str, Any], inference: bool, results: list[str]) -> None:
    """Receive and load all tensors, and append "" or the error to `results`. inference: True if
    SGLang's thread is in inference mode.
    """
    limit = timedelta(seconds=task["timeout"])
    device = next(model.parameters()).device
    try:
        if device.type == "cuda":  # a new thread starts with the first GPU
            torch.cuda.set_device(device)
        _leave(task["token"])
        received = []
        for name, rank, size, described in task["receive"]:
            if name not in _groups:
                store = _connect(task, "joins")
                _groups[name] = join(store, name, rank, size, task["backend"], limit)
            parts = described["slices"] + described["whole"]
            count = sum(math.prod(shape) for _, shape in parts)
            flat = torch.empty(count, dtype=getattr(torch, described["dtype"]), device=device)
            content = flat.view(torch.uint8)
            work = dist.broadcast(content, group=_groups[name], group_src=0, async_op=True)
            received.append((described, flat, work))
        for described, flat, work in received:
            work.wait()
            with torch.no_grad(), torch.inference_mode(inference):
                _load(model, described, flat)
        if device.type == "cuda":
            torch.cuda.synchronize()
        results.append("")
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:
        results.append(repr(error))


def _load(model: Any, described: dict[str, Any], flat: torch.Tensor) -> None:
    slices, whole = described["slices"], described["whole"]
    pieces = flat.split([math.prod(shape) for _, shape in (*slices, *whole)])
    parameters = dict(model.named_parameters())
    for (name, shape), piece in zip(slices, pieces[: len(slices)], strict=True):
        match = _ROWS.fullmatch(name)
        parameter = parameters[match[1] if match else name].data
        if match:
            parameter = parameter[int(match[2]) : int(match[3])]
        assert list(parameter.shape) == shape, f"{name} is {[*parameter.shape]} here, not {shape}"
        parameter.copy_(piece.view(shape))
    for module in model.modules():
        # A zero-centered norm keeps a copy of its weight plus one for fused kernels, and updates
        # the copy only in its own loader.
        if hasattr(module, "refresh_gemma_weight"):
            module.refresh_gemma_weight()
    if whole:
        rest = zip(whole, pieces[len(slices) :], strict=True)
        model.load_weights([(name, piece.view(shape)) for (name, shape), piece in rest])


def _leave(token: str) -> None:
    """Leave the groups whose names do not begin with `token`, and close their stores. An empty
    token leaves all groups.
    """
    for key in [key for key in _stores if key[0] != token]:
        _stores.pop(key, None)
    for name in [name for name in _groups if not (token and name.startswith(token))]:
        group = _groups.pop(name)
        with suppress(RuntimeError):
            group.abort()
            dist.destroy_process_group(group)
