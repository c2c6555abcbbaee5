"""A fake server whose ranks, in threads, hold parameters and load updates by our own loader, as
SGLang's ranks do.

`GlooEngine` is one in a process of its own, which joins process groups and can die in mid-update.
"""

import base64
import importlib.util
import io
import multiprocessing
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megavlm.inference.server import ClaimedPort
from megavlm.inference.server_main import LOADER
from megavlm.inference.server_support import megavlm_weights
from megavlm.weight_sync.checksums import tensor_hash
from tests.fakes.server import FakeServer

UPDATE = "/update_weights_from_tensor"
Shapes = Sequence[dict[str, Any]]  # of the parameters of each rank


class FakeEngine(FakeServer):
    """`spoil`: a parameter that its first rank changes after it has loaded an update. `dies_at`:
    the bucket, from 1, before which its process ends; 0: when it gets an update. fill: Value of
    its parameters at first; NaN is as memory that was released.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        weight_version: str = "3",
        port: int = 0,
        dies_at: int | None = None,
        fill: float = 0.0,
    ) -> None:
        super().__init__(weight_version=weight_version, device="cpu", port=port)
        self.info = {"custom_weight_loader": [LOADER], "tp_size": len(shapes)}
        self.spoil: str | None = None
        self._dies_at, self._buckets = dies_at, 0
        self.ranks = [_Parameters(of_rank, self, fill) for of_rank in shapes]
        self._modules = [_own_module() for _ in shapes]
        for module in self._modules:
            module._Update.load = self._counted(module._Update.load)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Parameters by name; with several ranks by "RANK NAME"."""
        return {
            name if len(self.ranks) == 1 else f"{number} {name}": parameter.data
            for number, rank in enumerate(self.ranks)
            for name, parameter in rank.named_parameters()
        }

    def answer(self, path: str, body: Any) -> Any:
        if path == UPDATE:
            self._die_at(0)
            contents = map(unpack, body["serialized_named_tensors"])
            with ThreadPoolExecutor(len(self.ranks)) as pool:
                loaders = [module.receive for module in self._modules]
                [*pool.map(lambda load, *args: load(*args), loaders, self.ranks, contents)]
            if not self.deaf:
                self.weight_version = body["weight_version"]
        if path == "/weights_checker":
            ranks = [
                {name: tensor_hash(x.data, "cpu") for name, x in rank.named_parameters()}
                for rank in self.ranks
            ]
            return {"ranks": [{"checksums": checksums} for checksums in ranks]}
        return super().answer(path, body)

    def _counted(self, load: Any) -> Any:
        def counting(*args: Any) -> None:
            self._buckets += 1
            self._die_at(self._buckets)
            load(*args)

        return counting

    def _die_at(self, bucket: int) -> None:
        if bucket == self._dies_at:
            os._exit(9)


def unpack(content: str) -> Any:
    return pickle.load(io.BytesIO(base64.b64decode(content)))  # noqa: S301  # our own


class GlooEngine:
    """A context."""

    def __init__(self, shapes: Shapes, *, dies_at: int | None = None, fill: float = 0.0) -> None:
        self._shapes, self._dies_at, self._fill = shapes, dies_at, fill
        self._port = ClaimedPort()  # no other program takes it while the process is replaced

    def __enter__(self) -> "GlooEngine":
        self._start()
        return self

    def restart(self) -> None:
        """Replace the process by another at the same address."""
        self.__exit__()
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._dies_at, self._port.number, self._shapes, self._fill)
        )
        self._process.start()
        self.url: str = self._pipe.recv()

    def state(self) -> tuple[str, dict[str, Tensor]]:
        """Return its weight version and its parameters."""
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

    def groups(self) -> int:
        """Return how many process groups its ranks have joined."""
        self._pipe.send("groups")
        count: int = self._pipe.recv()
        return count

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, dies_at: int | None, port: int, shapes: Shapes, fill: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    opened, joined = count_stores(), count_groups()
    # Ranks in threads join one group, but torch registers only one of a name in a process.
    c10d._register_process_group = lambda *_: None
    c10d._unregister_process_group = lambda *_: None
    with FakeEngine(shapes, port=port, dies_at=dies_at, fill=fill) as engine:
        pipe.send(engine.url)
        while request := pipe.recv():
            weights = {name: tensor.tolist() for name, tensor in engine.weights.items()}
            answers = {
                "state": (engine.weight_version, weights),
                "paths": engine.paths(),
                "connections": len(opened),
                "groups": len(joined),
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


def count_groups() -> list[str]:
    """Return a list that has the name of each process group that this process joins from now on."""
    joined: list[str] = []
    original = c10d._new_process_group_helper

    def joins(*args: Any, **kwargs: Any) -> Any:
        joined.append(str(kwargs["group_name"]))
        return original(*args, **kwargs)

    c10d._new_process_group_helper = joins
    return joined


def _own_module() -> Any:
    """Load our loader once more: a rank's process has groups of its own."""
    spec = importlib.util.find_spec(megavlm_weights.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Parameters:
    """A model, which is one module of its own."""

    def __init__(self, shapes: dict[str, Any], engine: FakeEngine, fill: float) -> None:
        self._held = {
            name: torch.nn.Parameter(torch.full([*x], fill)) for name, x in shapes.items()
        }
        self._engine = engine

    def named_parameters(self) -> Any:
        return self._held.items()

    def modules(self) -> list[Any]:
        return [self]

    def parameters(self) -> Any:
        return iter(self._held.values())

    def refresh_gemma_weight(self) -> None:
        if self._engine.spoil in self._held and self is self._engine.ranks[0]:
            self._held[self._engine.spoil].data[0] += 1
