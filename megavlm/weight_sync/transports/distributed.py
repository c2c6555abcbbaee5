"""Transport by broadcast from each pipeline stage to all ranks of all servers (NCCL or gloo).

The first rank of a stage is rank 0 of a process group whose other ranks are the servers'. SGLang
loads what it receives as it loads files: every rank of a server gets whole tensors and keeps its
slices.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server import free_port
from megavlm.parallel import platform
from megavlm.weight_sync.attempt import SyncAttempt, TensorBucket
from megavlm.weight_sync.server_api import CLEANUP_TIMEOUT, Servers
from megavlm.weight_sync.transports.payload import flatten

PROBE_WINDOW = 10.0  # seconds that a server whose process died may take to stop answering
PROBE_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class UpdateGroup:
    """Process group of this rank, as rank 0, and every rank of some servers."""

    name: str
    urls: tuple[str, ...]
    ours: dist.ProcessGroup
    servers: Servers


class DistributedTransport:
    """Broadcasts buckets in process groups with the servers.

    A group lasts until its servers change, or one of them fails or restarts.

    address: of this rank's machine, as servers see it. timeout: seconds that joining a group and
    each broadcast may take.
    """

    by_stage = True
    in_session = True
    collective = True

    def __init__(self, address: str, *, timeout: float = 300.0) -> None:
        self._address, self._timeout = address, timeout
        self._groups: dict[tuple[str, ...], UpdateGroup] = {}

    def open(self, servers: Servers, attempt: SyncAttempt) -> None:
        self._servers, self._layouts = servers, attempt.layouts
        # The process of a server that needs all may not be the one that joined.
        unsure = {target.url for target in attempt.targets if target.needs_all}
        for group in [group for group in self._groups.values() if unsure & {*group.urls}]:
            self._leave(group)

    def send(self, bucket: TensorBucket) -> int:
        urls = bucket.urls
        if urls not in self._groups:
            for group in self._changed_groups(urls):
                self._leave(group)
            name, join, invitations = self._invite(urls)
            ours = self._run_with_servers(join, "/init_weights_update_group", invitations)
            self._groups[urls] = UpdateGroup(name, urls, ours, self._servers)
        group = self._groups[urls]
        flat, places = flatten(bucket.tensors)
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
            self._run_with_servers(
                broadcast, "/update_weights_from_distributed", dict.fromkeys(urls, body)
            )
        except WeightSyncError:
            self._leave(group)
            raise
        return flat.nbytes * (group.ours.size() - 1)

    def close(self, attempt: SyncAttempt | None = None) -> None:
        if attempt is None:
            for group in list(self._groups.values()):
                self._leave(group)

    def _changed_groups(self, urls: tuple[str, ...]) -> list[UpdateGroup]:
        """Return the groups with some of these servers and without others: servers came or went."""
        groups = [group for group in self._groups.values() if {*group.urls} & {*urls}]
        return [group for group in groups if not {*urls} <= {*group.urls}]

    def _invite(
        self, urls: tuple[str, ...]
    ) -> tuple[str, Callable[[], dist.ProcessGroup], dict[str, Any]]:
        """Return a new group's name, what joins it on this rank, and the servers' requests."""
        ranks = [self._layouts[url].tensor_parallel for url in urls]
        size = 1 + sum(ranks)
        name, port = f"megavlm_{secrets.token_hex(4)}", free_port()
        invitation = {
            "master_address": self._address,
            "master_port": port,
            "world_size": size,
            "group_name": name,
            "backend": platform.backend(),
        }
        offsets = [1 + sum(ranks[:index]) for index in range(len(ranks))]
        invitations = {
            url: invitation | {"rank_offset": offset}
            for url, offset in zip(urls, offsets, strict=True)
        }
        return name, lambda: _join(self._address, port, size, name, self._timeout), invitations

    def _leave(self, group: UpdateGroup) -> None:
        del self._groups[group.urls]
        # Also ends what servers still wait for: their connections to this rank are closed.
        group.ours.abort()
        dist.destroy_process_group(group.ours)
        body = {"group_name": group.name}
        for url in group.urls:
            with suppress(WeightSyncError):  # the server may be gone
                group.servers.request(
                    url, "/destroy_weights_update_group", body, timeout=CLEANUP_TIMEOUT
                )

    def _run_with_servers(
        self, ours: Callable[[], Any], path: str, bodies: Mapping[str, Mapping[str, Any]]
    ) -> Any:
        """Run this rank's side of a collective while the servers run theirs. Returns its result.

        A failure of one side ends it for all: dead servers are lost or, if none is dead, those that
        refused. Raises WeightSyncError. Threads are not joined then, because this rank's side may
        wait until its own timeout.
        """
        initializer, arguments = platform.join, (platform.device(),)
        pool = ThreadPoolExecutor(1 + len(bodies), "collective", initializer, arguments)
        mine: Future[Any] = pool.submit(ours)
        theirs: dict[Future[Any], str] = {}
        for url, body in bodies.items():
            theirs[pool.submit(self._servers.request, url, path, body)] = url
        done, waiting = wait({mine, *theirs}, self._timeout, FIRST_EXCEPTION)
        pool.shutdown(wait=False)
        errors = {future: error for future in done if (error := future.exception())}
        if not errors and not waiting:
            return mine.result()
        refused = {
            theirs[future]: str(error) for future, error in errors.items() if future in theirs
        }
        dead: dict[str, str] = {}
        deadline = time.monotonic() + (0.0 if refused else PROBE_WINDOW)
        while True:
            for url in bodies:
                try:
                    self._servers.request(url, "/model_info", timeout=PROBE_TIMEOUT)
                except WeightSyncError as error:
                    dead[url] = str(error)
            if dead or time.monotonic() >= deadline:
                break
            time.sleep(0.2)
        for url, reason in (dead or refused).items():
            self._servers.lose(url, reason)
        reasons = [*refused.values(), *(repr(error) for error in errors.values())]
        raise WeightSyncError(
            reasons[0] if reasons else f"{path} did not complete within {self._timeout:g} s"
        )


def _join(address: str, port: int, world_size: int, name: str, timeout: float) -> dist.ProcessGroup:
    """Join a group beside the default one, as SGLang's `init_custom_process_group` does.

    `rendezvous` is not used: under torchrun it would look for torchrun's own store.
    """
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(
        address, port, world_size, is_master=True, timeout=limit, wait_for_workers=False
    )
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        dist.Backend(platform.backend()),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
