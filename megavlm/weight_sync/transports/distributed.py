"""Broadcast from each pipeline stage to all ranks of all servers: NCCL on GPUs, gloo on CPUs.

The first rank of a stage is rank 0 of a group whose other ranks are the servers'. SGLang loads what
it receives so as it does files: every rank of a server gets whole tensors and keeps its slices.
"""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server import free_port
from megavlm.parallel import platform
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import Engine
from megavlm.weight_sync.transports.base import Load
from megavlm.weight_sync.transports.payload import flatten

GRACE = 10.0  # seconds for a server whose process died to stop answering
PROBE = 5.0  # seconds for an answer to a probe


@dataclass(frozen=True)
class Group:
    name: str
    urls: tuple[str, ...]
    ours: dist.ProcessGroup
    servers: Servers


class DistributedTransport:
    """address: of this rank's machine, as servers see it. timeout: seconds that joining a group and
    each broadcast may take.

    A group lasts until its servers change, or one of them fails or is started anew.
    """

    by_stage = True
    in_session = True
    together = True

    def __init__(self, *, backend: str, address: str, timeout: float = 300.0) -> None:
        self._backend, self._address, self._timeout = backend, address, timeout
        self._groups: dict[tuple[str, ...], Group] = {}

    def prepare(self) -> None:
        pass

    def open(self, servers: Servers, engines: Mapping[str, Engine]) -> None:
        self._servers, self._engines = servers, engines
        # The process of one that needs all may be another than that which joined.
        unsure = {target.url for target in servers.live if target.needs_all}
        for group in [group for group in self._groups.values() if unsure & {*group.urls}]:
            self._leave(group)

    def send(self, load: Load) -> int:
        group = self._group(load.urls)
        flat, places = flatten(load.tensors)
        body = {
            "names": [place.name for place in places],
            "dtypes": [str(place.dtype).removeprefix("torch.") for place in places],
            "shapes": [list(place.shape) for place in places],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }

        def broadcast() -> None:
            dist.broadcast(flat, group=group.ours, group_src=0)
            platform.synchronize()

        try:
            self._together(
                broadcast, "/update_weights_from_distributed", dict.fromkeys(group.urls, body)
            )
        except WeightSyncError:
            self._leave(group)
            raise
        return flat.nbytes * (group.ours.size() - 1)

    def commit(self, servers: Servers, refitted: Sequence[str]) -> None:
        pass

    def abort(self, servers: Servers) -> None:
        pass

    def close(self) -> None:
        for group in list(self._groups.values()):
            self._leave(group)

    def _group(self, urls: tuple[str, ...]) -> Group:
        """The group of some servers; those of others that it could be mistaken for are left."""
        if urls in self._groups:
            return self._groups[urls]
        for group in [group for group in self._groups.values() if {*group.urls} & {*urls}]:
            if not {*urls} <= {*group.urls}:  # servers have come or gone
                self._leave(group)
        ranks = [self._engines[url].tensor_parallel for url in urls]
        size = 1 + sum(ranks)
        name, port = f"megavlm_{secrets.token_hex(4)}", free_port()
        invitation = {
            "master_address": self._address,
            "master_port": port,
            "world_size": size,
            "group_name": name,
            "backend": self._backend,
        }
        offsets = [1 + sum(ranks[:index]) for index in range(len(ranks))]
        ours = self._together(
            lambda: _join(self._backend, self._address, port, size, name, self._timeout),
            "/init_weights_update_group",
            {
                url: invitation | {"rank_offset": offset}
                for url, offset in zip(urls, offsets, strict=True)
            },
        )
        self._groups[urls] = Group(name, urls, ours, self._servers)
        return self._groups[urls]

    def _leave(self, group: Group) -> None:
        del self._groups[group.urls]
        # Also ends what servers still wait for: their connections to this rank are closed.
        group.ours.abort()
        dist.destroy_process_group(group.ours)
        group.servers.try_each(
            "/destroy_weights_update_group", {"group_name": group.name}, group.urls
        )

    def _together(self, ours: Any, path: str, bodies: Mapping[str, Mapping[str, Any]]) -> Any:
        """Runs our side of a collective while the servers run theirs.

        A failure of one ends it for all: servers that are dead are lost, or where none is, those
        that refused. Threads are not joined then, as ours may wait on until its own timeout.
        """
        initializer, arguments = platform.join, (platform.device(),)
        pool = ThreadPoolExecutor(1 + len(bodies), "collective", initializer, arguments)
        mine: Future[Any] = pool.submit(ours)
        theirs = {
            pool.submit(self._servers.request, "POST", url, path, body): url
            for url, body in bodies.items()
        }
        done, waiting = wait({mine, *theirs}, self._timeout, FIRST_EXCEPTION)
        pool.shutdown(wait=False)
        errors = {future: error for future in done if (error := future.exception())}
        if not errors and not waiting:
            return mine.result()
        refused = {
            theirs[future]: str(error) for future, error in errors.items() if future in theirs
        }
        for url, reason in (self._dead(bodies, patient=not refused) or refused).items():
            self._servers.lose(url, reason)
        reasons = [*refused.values(), *(repr(error) for error in errors.values())]
        raise WeightSyncError(
            reasons[0] if reasons else f"{path} did not complete within {self._timeout:g} s"
        )

    def _dead(self, urls: Iterable[str], *, patient: bool) -> dict[str, str]:
        """Servers that do not answer, and why. `patient`: wait for one to show."""
        deadline = time.monotonic() + (GRACE if patient else 0.0)
        while True:
            dead = {}
            for url in urls:
                try:
                    self._servers.request("GET", url, "/model_info", None, timeout=PROBE)
                except WeightSyncError as error:
                    dead[url] = str(error)
            if dead or time.monotonic() >= deadline:
                return dead
            time.sleep(0.2)


def _join(
    backend: str, address: str, port: int, world_size: int, name: str, timeout: float
) -> dist.ProcessGroup:
    """A group beside the default one, as SGLang's `init_custom_process_group` makes its side of it.

    Not by `rendezvous`: under torchrun that would look for torchrun's own store.
    """
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(
        address, port, world_size, is_master=True, timeout=limit, wait_for_workers=False
    )
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        dist.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
