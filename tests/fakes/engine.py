"""A fake server that keeps the weights that it is sent and reports their checksums, as SGLang does.

`GlooEngine` is one in a process of its own, which joins update groups and can die in mid-update; of
several ranks it runs our own weight loaders, as SGLang's ranks do.
"""

import base64
import hashlib
import importlib.util
import io
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megavlm.inference.server_main import LOADERS
from megavlm.inference.server_support import megavlm_weights
from megavlm.weight_sync.checksums import tensor_hash
from megavlm.weight_sync.sglang_layout import ServerLayout, server_tensors
from tests.fakes.server import FakeServer, Refusal


class FakeEngine(FakeServer):
    """`updates` lists the names that each update brought. `spoil`: an engine tensor whose checksum
    comes out wrong. `in_session`: between begin_weight_update and end_weight_update.
    """

    def __init__(self, *, weight_version: str = "3", port: int = 0) -> None:
        super().__init__(weight_version=weight_version, device="cpu", port=port)
        self.weights: dict[str, Tensor] = {}
        self.updates: list[list[str]] = []
        self.spoil: str | None = None
        self.in_session = False

    def answer(self, path: str, body: Any) -> Any:
        if path in ("/begin_weight_update", "/end_weight_update"):
            begins = path == "/begin_weight_update"
            if self.in_session is begins:
                raise Refusal(400, "a weight-update session is already open, or none is")
            self.in_session = begins
        if path == "/update_weights_from_tensor":
            self.load(*bucket(body))
        if path == "/weights_checker":
            return {"ranks": [{"checksums": self.checksums()}]}
        return super().answer(path, body)

    def load(self, flat: Tensor, places: Any) -> None:
        for place in places:
            part = flat[place.start_idx : place.end_idx].clone()
            self.weights[place.name] = part.view(place.dtype).view(place.shape)
        self.updates.append([place.name for place in places])

    def checksums(self) -> dict[str, str]:
        found = {
            name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()[:16]
            for name, tensor in server_tensors(self.weights, ServerLayout(), 0)
        }
        return found | ({self.spoil: "0" * 16} if self.spoil else {})


def bucket(body: Any) -> tuple[Tensor, Any]:
    """Return the flattened tensor and the places in it, as SGLang unpacks an update."""
    (content,) = body["serialized_named_tensors"]
    loaded = unpack(content)
    return loaded["flattened_tensor"], loaded["metadata"]


def unpack(content: str) -> Any:
    return pickle.load(io.BytesIO(base64.b64decode(content)))  # noqa: S301  # our own


Shapes = list[dict[str, Any]]  # of the parameters of each rank


class GlooEngine:
    """A context. `dies_at`: the update, from 1, in whose midst its process ends. `shapes`: it has
    ranks with these parameters, which load slices.
    """

    def __init__(self, dies_at: int | None = None, shapes: Shapes | None = None) -> None:
        self._dies_at, self._shapes = dies_at, shapes

    def __enter__(self) -> "GlooEngine":
        self._start(0)
        return self

    def restart(self) -> None:
        """Replace the process by another at the same address."""
        self.__exit__()
        self._start(int(self.url.rpartition(":")[2]))

    def _start(self, port: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._dies_at, port, self._shapes)
        )
        self._process.start()
        self.url: str = self._pipe.recv()

    def state(self) -> tuple[str, dict[str, Tensor]]:
        """Return its weight version and weights, those of ranks by "RANK NAME"."""
        self._pipe.send("state")
        version, weights = self._pipe.recv()
        return version, {name: torch.tensor(values) for name, values in weights.items()}

    def paths(self) -> list[str]:
        """Return the paths of the requests that came in."""
        self._pipe.send("paths")
        paths: list[str] = self._pipe.recv()
        return paths

    def connections(self) -> int:
        """Return how many connections to stores its ranks have opened."""
        self._pipe.send("connections")
        count: int = self._pipe.recv()
        return count

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, dies_at: int | None, port: int, shapes: Shapes | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    opened = count_stores()
    engine = _Gloo(dies_at, port) if shapes is None else _Ranks(dies_at, port, shapes)
    with engine:
        pipe.send(engine.url)
        while request := pipe.recv():
            weights = {name: tensor.tolist() for name, tensor in engine.weights.items()}
            answers = {
                "state": (engine.weight_version, weights),
                "paths": engine.paths(),
                "connections": len(opened),
            }
            pipe.send(answers[request])


def count_stores() -> list[int]:
    """Return a list that has the port of each store that this process opens from now on."""
    opened: list[int] = []
    original = dist.TCPStore

    def opens(*args: Any, **kwargs: Any) -> dist.TCPStore:
        store = original(*args, **kwargs)
        opened.append(store.port)
        return store

    dist.TCPStore = opens  # type: ignore[assignment,misc]
    return opened


class _Gloo(FakeEngine):
    def __init__(self, dies_at: int | None, port: int) -> None:
        super().__init__(port=port)
        self.dies_at = dies_at
        self.groups: dict[str, Any] = {}
        self.count = 0

    def answer(self, path: str, body: Any) -> Any:
        if path == "/init_weights_update_group":
            self.groups[body["group_name"]] = join(body)
        if path == "/update_weights_from_distributed":
            self.count += 1
            if self.count == self.dies_at:
                os._exit(9)
            self.receive(body)
        if path == "/destroy_weights_update_group":
            dist.destroy_process_group(self.groups.pop(body["group_name"]))
        return super().answer(path, body)

    def receive(self, body: Any) -> None:
        shapes = [torch.Size(shape) for shape in body["shapes"]]
        flat = torch.empty(sum(shape.numel() for shape in shapes))
        dist.broadcast(flat.view(torch.uint8), group=self.groups[body["group_name"]], group_src=0)
        parts = flat.split([shape.numel() for shape in shapes])
        for name, shape, part in zip(body["names"], shapes, parts, strict=True):
            self.weights[name] = part.view(shape)
        self.updates.append(body["names"])


class _Ranks(_Gloo):
    """Ranks of one server, in threads."""

    def __init__(self, dies_at: int | None, port: int, shapes: Shapes) -> None:
        super().__init__(dies_at, port)
        self.info = {"custom_weight_loader": LOADERS, "tp_size": len(shapes)}
        self.ranks = [_Parameters(of_rank) for of_rank in shapes]
        self.modules = [_own_module() for _ in shapes]
        self.weights = {
            f"{number} {name}": parameter.data
            for number, rank in enumerate(self.ranks)
            for name, parameter in rank.named_parameters()
        }

    def answer(self, path: str, body: Any) -> Any:
        if path == "/update_weights_from_tensor":
            self.count += 1
            if self.count == self.dies_at:
                os._exit(9)
            load = body["load_format"].partition(".")[2]
            loaders = [getattr(module, load) for module in self.modules]
            contents = map(unpack, body["serialized_named_tensors"])
            with ThreadPoolExecutor(len(self.ranks)) as pool:
                [*pool.map(lambda load, *args: load(*args), loaders, self.ranks, contents)]
            return {"success": True, "message": "Success."}
        if path == "/weights_checker":
            ranks = [
                {name: tensor_hash(x.data, "cpu") for name, x in rank.named_parameters()}
                for rank in self.ranks
            ]
            return {"ranks": [{"checksums": checksums} for checksums in ranks]}
        return super().answer(path, body)


def _own_module() -> Any:
    """Load our loaders once more: a rank's process has groups of its own."""
    spec = importlib.util.find_spec(megavlm_weights.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Parameters:
    """A model."""

    def __init__(self, shapes: dict[str, Any]) -> None:
        self._held = {name: torch.nn.Parameter(torch.zeros(x)) for name, x in shapes.items()}

    def named_parameters(self) -> Any:
        return self._held.items()

    def modules(self) -> list[Any]:
        return []

    def parameters(self) -> Any:
        return iter(self._held.values())


def join(body: Any) -> Any:
    limit, name = timedelta(seconds=30), body["group_name"]
    store = dist.TCPStore(
        body["master_address"], body["master_port"], body["world_size"], False, timeout=limit
    )
    group, _ = c10d._new_process_group_helper(
        body["world_size"],
        body["rank_offset"],
        [],
        dist.Backend(body["backend"]),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(body["world_size"])}
    return group
