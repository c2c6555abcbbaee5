"""Weight loader that runs inside SGLang's ranks: in one request, a rank receives every bucket of
an update from all trainer ranks that send to it, copies them into place, and returns checksums.

SGLang calls `receive` by its name in `--custom-weight-loader`. Its own loaders take only whole
tensors, or one bucket a request. Besides the standard library, this module imports only torch at
first. The trainer imports it for `pack`, `checksum` and `join`, so that both sides run the same
code.

A rank gets one pair: a JSON text (the task) and an empty tensor. The task has `host` and `port` of
the trainer's store, `timeout` in seconds for each bucket, `attempt`, the prefix of the attempt's
keys, and `answer`, the key of this rank's answer. `streams` has for each sender the key of its
stream and this rank's place among the stream's readers; `group`, if weights come over the network,
[name, rank, size, backend, ranks of the senders], and otherwise they are in the senders' memory.
`base` is the attempt whose weights this rank must have if buckets come as changes of them, which
`megavlm_delta` restores, and otherwise null; the sender's keys then have [bytes, parts] of each.
`plan` is the digest of the plan, and `content` the plan itself if this process may not have it:
`names`, [name, shape, dtype, whole] of each parameter; `full`, true if it has all parameters;
`rounds`; `streams`, for each sender a list of buckets, which are lists of pieces [place in names,
row, dim, start, length]; and `copies`, parameter -> another name under which some servers have a
separate copy of it.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from itertools import chain
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

POLL = 0.2  # seconds between checks for a fault; the end of the work itself is seen at once
GRACE = 5.0  # seconds for a thread to end after its group was left
WORDS = 2**21  # words of a checksum that are multiplied at a time, 16 MiB
Piece = tuple[int, int | None, int, int, int]
Task = dict[str, Any]
# Of a stream's bucket. The last argument has the parts of its changes; None: the bucket is whole.
Load = Callable[[int, int, torch.Tensor, Any], None]

_plans: dict[str, Any] = {}  # by digest: one of what training changes, and one of everything
_groups: dict[str, dist.ProcessGroup] = {}
_drafts: list[Any] = []  # this rank's draft models, whose weights updates name mtp.*
_loaded: list[str] = []  # the attempt whose weights this process has; empty while it loads others
# Connections to the trainer's store, by address and use. Waiting blocks a connection for all its
# users, so each use has its own. They are kept for the run, because torch resolves names for each
# new one.
_stores: dict[tuple[str, int, str], dist.TCPStore] = {}

logger = logging.getLogger(__name__)


def receive(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Receive an update. This rank answers with a JSON object in the trainer's store: `error`, why
    it did not load the update; `sums`, the checksums of each stream's buckets; or `gave_up`,
    because another rank has failed. Any rank that fails sets `ATTEMPT/fault`. Nothing is raised,
    because an exception would end SGLang's process.
    """
    task = json.loads(named_tensors[0][0])
    if "folder" in task:
        _receive_links(model, task)
        return
    try:
        store = _connect(task, "answers")
        # In a thread, because receiving hangs if a sender has died.
        answers: list[dict[str, Any]] = []
        arguments = (_receive, model, task, torch.is_inference_mode_enabled(), answers)
        work = Thread(target=copy_context().run, args=arguments, daemon=True)
        work.start()
        fault = task["attempt"] + "/fault"
        while work.is_alive() and not store.check([fault]):
            work.join(POLL)
        if store.check([fault]):
            _give_up()
            work.join(GRACE)
            answers = [{"gave_up": True}]
        answer = answers[0] if answers else {"error": "its thread ended, as its log says"}
        store.set(task["answer"], json.dumps(answer))
        if "error" in answer:
            store.set(fault, json.dumps({"reason": answer["error"], "lost": {}}))
    except RuntimeError as error:  # the trainer has died
        logger.warning("weights were not received: %r", error)
        _give_up()


def pack(parts: Sequence[torch.Tensor], buffer: torch.Tensor, types: Sequence[torch.dtype]) -> None:
    """Copy tensors to a buffer of bytes, one after the other, as numbers of `types`."""
    _copy(_views(buffer, [part.shape for part in parts], types), parts)


def checksum(content: torch.Tensor) -> torch.Tensor:
    """Return the checksum of bytes [n] as two int64 words: the sum of their words of eight bytes,
    and the sum of each word times its place, modulo 2**64.
    """
    count = len(content) // 8
    total = torch.zeros(2, dtype=torch.int64, device=content.device)
    indices = torch.arange(1, min(count, WORDS) + 1, device=content.device)
    for start in range(0, count, WORDS):
        words = content[8 * start : 8 * min(start + WORDS, count)].view(torch.int64)
        part = words.sum()
        total[0] += part
        total[1] += (words * indices[: len(words)]).sum() + start * part
    if len(content) % 8:
        rest = torch.zeros(8, dtype=torch.uint8, device=content.device)
        rest[: len(content) % 8] = content[8 * count :]
        total += rest.view(torch.int64) * torch.tensor([1, count + 1], device=content.device)
    return total


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


def wait_for(store: dist.Store, keys: Sequence[str], fault: str, timeout: float) -> None:
    """Block until a store has all keys. Raises RuntimeError if it has `fault`, or after `timeout`
    seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        with suppress(dist.DistStoreError):
            store.wait([*keys], timedelta(seconds=POLL))
            return
        if store.check([fault]):
            raise RuntimeError("another rank failed")
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing came for {timeout:g} s")


def take(store: dist.Store, key: str) -> str:
    """Return the value of a key once it is set, and remove it."""
    value: str = store.get(key).decode()
    store.delete_key(key)
    return value


def leave(group: dist.ProcessGroup) -> None:
    """Leave a process group, which ends what its ranks wait for."""
    with suppress(RuntimeError):
        group.abort()
        dist.destroy_process_group(group)


def install() -> None:
    """Make SGLang's ranks open a weight-update session around an update of this loader, so that it
    needs no requests of its own, and give quantised models no scales of their KV cache.
    """
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.scheduler_components import weight_updater

    manager = weight_updater.SchedulerWeightUpdaterManager
    update = manager.update_weights_from_tensor

    def update_weights_from_tensor(self: Any, request: Any) -> Any:
        if request.load_format != f"{__name__}.receive":
            return update(self, request)
        # Each rank would be asked for a second answer, by its draft model.
        if hasattr(request, "selector"):
            request.selector = "target"
        if self.draft_worker is not None:
            runners = self.draft_worker.weight_update_runners()
            _drafts[:] = [runner.model for _, runner in runners]
        # Beginning and ending restore and process weights that a server stores in another form, as
        # quantized ones. A session that is already open stays open.
        begun = self.begin_weight_update(io_struct.BeginWeightUpdateReqInput())
        try:
            return update(self, request)
        finally:
            if begun.success:
                self.end_weight_update(io_struct.EndWeightUpdateReqInput())

    manager.update_weights_from_tensor = update_weights_from_tensor
    process = BaseKVCacheMethod.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        # An update has none, and a start without weights or released memory leaves anything in
        # them. Some attention kernels multiply with them although the cache is not quantised.
        layer.k_scale.data.fill_(1.0)
        layer.v_scale.data.fill_(1.0)
        process(self, layer)

    BaseKVCacheMethod.process_weights_after_loading = process_weights_after_loading


def _connect(task: Task, use: str) -> dist.TCPStore:
    key = task["host"], task["port"], use
    if key not in _stores:
        for old in [old for old in _stores if old[:2] != key[:2]]:  # of an earlier run
            del _stores[old]
        limit = timedelta(seconds=task["timeout"])
        _stores[key] = dist.TCPStore(*key[:2], is_master=False, timeout=limit)
    return _stores[key]


def _receive(model: Any, task: Task, inference: bool, answers: list[dict[str, Any]]) -> None:
    """Receive and load all buckets, and append the answer. inference: True if SGLang's thread is
    in inference mode.
    """
    device = next(model.parameters()).device
    try:
        if device.type == "cuda":  # a new thread starts with the first GPU
            torch.cuda.set_device(device)
        plan = _plan(task)
        assert task["base"] in (None, *_loaded), "this process has not loaded the update before"
        _loaded.clear()
        store = _connect(task, "waits")
        with torch.no_grad(), torch.inference_mode(inference):
            update = _Update(model, plan, device)
            receiver = _by_network if task["group"] else _from_memory
            receiver(task, plan, store, device, update.load)
            update.finish()
            answers.append({"sums": update.sums()})
            _loaded.append(task["attempt"])
    except (AssertionError, KeyError, OSError, RuntimeError, ValueError) as error:
        text = str(error) if isinstance(error, (AssertionError, OSError)) else repr(error)
        answers.append({"error": text})


def _receive_links(model: Any, task: Task) -> None:
    """Load the links of a chain that this rank lacks, and write the answer to the store."""
    from megavlm.inference.server_support import megavlm_chain

    answers: list[dict[str, Any]] = []
    inference = torch.is_inference_mode_enabled()

    def work() -> None:
        device = next(model.parameters()).device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            links = megavlm_chain.missing_links(task, _loaded)
            is_whole = links == task["links"]
            _loaded.clear()
            with torch.no_grad(), torch.inference_mode(inference):
                update = _Update(model, _plan(task) | {"full": is_whole}, device)
                for stream, number, content, changes in megavlm_chain.read_links(
                    task, links, checksum
                ):
                    update.load(stream, number, content.to(device), changes)
                update.finish()
                answers.append({"sums": update.sums()})
            _loaded.append(task["links"][-1])
        except (AssertionError, KeyError, OSError, RuntimeError, ValueError) as error:
            answers.append({"error": repr(error)})

    # In a thread, because an exception of a file system must not end SGLang's process.
    thread = Thread(target=copy_context().run, args=(work,), daemon=True)
    thread.start()
    thread.join()
    try:
        megavlm_chain.write_answer(task, answers[0] if answers else {"error": "as its log says"})
    except OSError as error:
        logger.warning("the store took no answer: %r", error)


def _plan(task: Task) -> Any:
    digest = task["plan"]
    if "content" in task:
        while len(_plans) > 1:
            del _plans[next(iter(_plans))]
        _plans[digest] = task["content"]
    assert digest in _plans, "this process has not been sent the plan of the update"
    return _plans[digest]


class _Update:
    """Parameters of a model under an update."""

    def __init__(self, model: Any, plan: Any, device: torch.device) -> None:
        self._model, self._plan, self._device = model, plan, device
        self._parameters = dict(model.named_parameters())
        for draft in _drafts:
            named = draft.named_parameters()
            # Its embedding and output head are the target's.
            self._parameters |= {f"mtp.{name.removeprefix('model.')}": x for name, x in named}
        self._whole: dict[str, tuple[torch.Tensor, int]] = {}
        for name, shape, dtype, whole in plan["names"]:
            if whole:
                continue
            assert name in self._parameters, f"the server's model has no parameter {name}"
            found = self._parameters[name]
            held = [*found.shape], str(found.dtype).removeprefix("torch.")
            assert held == (shape, dtype), (
                f"{name} is {held[1]} {held[0]} in the server, but {dtype} {shape} in the trainer"
            )
        self._copies = {
            name: self._parameters[copy]
            for name, copy in plan["copies"].items()
            if copy in self._parameters
        }
        if plan["full"]:
            self._clear_padding()

    def _clear_padding(self) -> None:
        """Set parameters with padding to zero, because padding is not sent. After memory was
        released without a backup, padding is uninitialised.
        """
        rest = {
            name: self._parameters[name].numel() for name, *_, w in self._plan["names"] if not w
        }
        for buckets in self._plan["streams"]:
            for piece in (piece for pieces in buckets for piece in pieces):
                name, *_, whole = self._plan["names"][piece[0]]
                if not whole:
                    rest[name] -= self._place(piece).numel()
        for name in [name for name, count in rest.items() if count]:
            self._parameters[name].data.zero_()
            if name in self._copies:
                self._copies[name].data.zero_()

    def load(self, stream: int, number: int, buffer: torch.Tensor, changes: Any) -> None:
        """Load bucket `number` of a stream. changes: See `Load`."""
        pieces = self._plan["streams"][stream][number]
        places = [self._place(piece) for piece in pieces]
        if changes is not None:
            buffer = _restored(places, buffer, changes)
        parts = _views(buffer, [x.shape for x in places], [x.dtype for x in places])
        _copy(places, parts)
        for piece, part in zip(pieces, parts, strict=True):
            name, _, _, whole = self._plan["names"][piece[0]]
            if name in self._copies:
                _at(self._copies[name], piece).copy_(part)
            if whole:
                tensor, missing = self._whole[name]
                self._whole[name] = tensor, missing - part.numel()
                if missing == part.numel():
                    for model in _drafts if name.startswith("mtp.") else [self._model]:
                        model.load_weights([(name, tensor)])
                    del self._whole[name]

    def finish(self) -> None:
        """Refresh what modules derive from their weights."""
        for module in chain(*(model.modules() for model in (self._model, *_drafts))):
            # A zero-centered norm keeps a copy of its weight plus one for fused kernels, and
            # updates the copy only in its own loader.
            if hasattr(module, "refresh_gemma_weight"):
                module.refresh_gemma_weight()

    def sums(self) -> list[list[list[int]]]:
        """Return the checksum of each bucket of each stream, as the parameters have it now. A
        separate copy of a parameter that differs makes it another.
        """
        found, counts = [], []
        for buckets in self._plan["streams"]:
            counts.append(len(buckets))
            for pieces in buckets:
                pieces = [piece for piece in pieces if not self._plan["names"][piece[0]][3]]
                places = [self._place(piece) for piece in pieces]
                size = sum(place.nbytes for place in places)
                buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
                pack(places, buffer, [place.dtype for place in places])
                total = checksum(buffer)
                for piece, place in zip(pieces, places, strict=True):
                    copy = self._copies.get(self._plan["names"][piece[0]][0])
                    if copy is not None:
                        total += (_at(copy, piece) != place).sum()
                found.append(total)
        words = torch.stack(found).tolist() if found else []
        return [[words.pop(0) for _ in range(count)] for count in counts]

    def _place(self, piece: Piece) -> torch.Tensor:
        name, shape, dtype, whole = self._plan["names"][piece[0]]
        if not whole:
            return _at(self._parameters[name].data, piece)
        if name not in self._whole:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._whole[name] = tensor, tensor.numel()
        return _at(self._whole[name][0], piece)


def _from_memory(
    task: Task, plan: Any, store: dist.Store, device: torch.device, load: Load
) -> None:
    """Load buckets from the senders' memory: each sender has two buffers, says which bucket is
    ready, and is told that it has been read.
    """
    fault, limit = task["attempt"] + "/fault", task["timeout"]
    buffers = []
    for key, place in task["streams"]:
        opened = f"{key}/open/{place}"
        wait_for(store, [opened], fault, limit)
        buffers.append(_opened(json.loads(store.get(opened)), device))
    for number in range(plan["rounds"]):
        for stream, (key, place) in enumerate(task["streams"]):
            wait_for(store, [f"{key}/ready/{number}"], fault, limit)
            changes = None
            if task["base"]:
                _, changes = json.loads(store.get(f"{key}/ready/{number}"))
            load(stream, number, buffers[stream][number % 2], changes)
            if device.type == "cuda":
                torch.cuda.synchronize()
            store.set(f"{key}/read/{number}/{place}", "")


def _opened(place: Any, device: torch.device) -> torch.Tensor:
    """Map the buffers of a sender, [2, bytes]."""
    if "file" in place:
        try:
            flat = torch.from_file(
                place["file"], shared=True, size=2 * place["bytes"], dtype=torch.uint8
            )
        except RuntimeError as error:
            raise OSError(
                f"it cannot open {place['file']} of the trainer: servers of rollout.sync=tensor "
                "must run on a machine of the trainer, as its user; set "
                "rollout.sync=distributed for others"
            ) from error
    else:
        uuid = place["gpu"]
        rest = [bytes.fromhex(x[0]) if isinstance(x, list) else x for x in place["handle"]]
        gpus = range(torch.cuda.device_count())
        same = [i for i in gpus if str(torch.cuda.get_device_properties(i).uuid) == uuid]
        if not same:
            raise OSError(
                f"it cannot see the trainer's GPU {uuid}, whose memory it must read: servers of "
                "rollout.sync=tensor must see all GPUs of the machine; set "
                "rollout.sync=distributed for others"
            )
        storage = torch.UntypedStorage._new_shared_cuda(same[0], *rest)
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        flat = flat[: 2 * place["bytes"]]
    return flat.view(2, place["bytes"])


def _by_network(task: Task, plan: Any, store: dist.Store, device: torch.device, load: Load) -> None:
    """Receive buckets in a process group with the senders, one while the bucket before is
    loaded.
    """
    name, rank, size, backend, senders = task["group"]
    _leave(name)
    if name not in _groups:
        limit = timedelta(seconds=task["timeout"])
        _groups[name] = join(store, name, rank, size, backend, limit)
        meet(_groups[name], device)
    group, names = _groups[name], plan["names"]
    sizes = [
        [sum(_bytes(names, piece) for piece in pieces) for pieces in buckets]
        for buckets in plan["streams"]
    ]
    flats = [
        torch.empty((2, max(of_stream, default=0)), dtype=torch.uint8, device=device)
        for of_stream in sizes
    ]

    changes: dict[tuple[int, int], Any] = {}  # by stream and number

    def post(number: int) -> list[Any]:
        operations = []
        for stream, (flat, of_stream, at) in enumerate(zip(flats, sizes, senders, strict=True)):
            size, key = of_stream[number], f"{task['streams'][stream][0]}/changes/{number}"
            if task["base"]:
                wait_for(store, [key], task["attempt"] + "/fault", task["timeout"])
                size, changes[stream, number] = json.loads(take(store, key))
            if size:
                part = flat[number % 2][:size]
                operations.append(dist.P2POp(dist.irecv, part, group=group, group_peer=at))
        return exchange(operations)

    works = post(0) if plan["rounds"] else []
    for number in range(plan["rounds"]):
        for work in works:
            work.wait()
        works = post(number + 1) if number + 1 < plan["rounds"] else []
        for stream, flat in enumerate(flats):
            load(stream, number, flat[number % 2], changes.pop((stream, number), None))
    if device.type == "cuda":
        torch.cuda.synchronize()


def exchange(operations: Iterable[Any]) -> list[Any]:
    """Start sends and receives as one batch."""
    together = [*operations]
    return dist.batch_isend_irecv(together) if together else []


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange a number with all ranks of a new group, because NCCL's first operation needs all of
    them.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _bytes(names: Any, piece: Piece) -> int:
    _, shape, dtype, _ = names[piece[0]]
    inner = shape if piece[1] is None else shape[1:]
    rows = inner[piece[2]]
    return math.prod(inner) // rows * piece[4] * getattr(torch, dtype).itemsize


def _at(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    _, row, dim, start, length = piece
    return (parameter if row is None else parameter[row]).narrow(dim, start, length)


def _views(
    buffer: torch.Tensor, shapes: Sequence[Sequence[int]], types: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    views, start = [], 0
    for shape, dtype in zip(shapes, types, strict=True):
        end = start + math.prod(shape) * dtype.itemsize
        views.append(buffer[start:end].view(dtype).view(*shape))
        start = end
    return views


def _restored(
    places: Sequence[torch.Tensor], written: torch.Tensor, changes: Sequence[Any]
) -> torch.Tensor:
    """Return a bucket from its changes and from what the parameters have."""
    # Here, because this module must be importable without megavlm.
    from megavlm.inference.server_support.megavlm_delta import Part, restore

    size = sum(place.nbytes for place in places)
    bucket = torch.empty(size, dtype=torch.uint8, device=written.device)
    pack(places, bucket, [place.dtype for place in places])
    restore([Part(*part) for part in changes], written, bucket)
    return bucket


def _copy(to: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_([*to], [*parts])


def _give_up() -> None:
    """Unblock a waiting thread. Uses a second connection, because the thread's own is blocked."""
    _leave("")
    for key in [key for key in _stores if key[2] == "waits"]:
        del _stores[key]


def _leave(but: str) -> None:
    """Leave all groups except one."""
    for name in [name for name in _groups if name != but]:
        leave(_groups.pop(name))
