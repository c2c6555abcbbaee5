"""Broadcast from trainer rank 0 to every rank of every server: NCCL between GPUs, gloo on CPUs."""

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megavlm.rollout.errors import WeightSyncError
from megavlm.rollout.weights.servers import Servers
from megavlm.rollout.weights.transports.bucket import flatten
from megavlm.rollout.weights.transports.session import Session

GROUP = c10d.GroupName("megavlm_weights")


class DistributedTransport(Session):
    """Rank 0 of a process group whose other ranks are the servers' tensor-parallel ranks.

    address, port: where the servers find this process, as they see it. timeout: seconds that
    joining the group and each broadcast may take.
    """

    def __init__(
        self, servers: Servers, *, backend: str, address: str, port: int, timeout: float = 300.0
    ) -> None:
        super().__init__(servers)
        self._timeout = timeout
        ranks = [int(info["tp_size"]) for info in servers.get("/server_info")]
        invitation = {
            "master_address": address,
            "master_port": port,
            "world_size": 1 + sum(ranks),
            "group_name": GROUP,
            "backend": backend,
        }
        offsets = [1 + sum(ranks[:index]) for index in range(len(ranks))]
        self._group = self._together(
            lambda: _join(backend, address, port, 1 + sum(ranks), timeout),
            "/init_weights_update_group",
            [invitation | {"rank_offset": offset} for offset in offsets],
        )

    def send(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        flat, places = flatten(tensors)
        body = {
            "names": [place.name for place in places],
            "dtypes": [str(place.dtype).removeprefix("torch.") for place in places],
            "shapes": [list(place.shape) for place in places],
            "group_name": GROUP,
            "load_format": "flattened_bucket",
            "flush_cache": True,
        }

        def broadcast() -> None:
            dist.broadcast(flat, group=self._group, group_src=0)

        self._together(
            broadcast, "/update_weights_from_distributed", [body] * len(self.servers.urls)
        )
        return flat.nbytes * (self._group.size() - 1)

    def close(self) -> None:
        dist.destroy_process_group(self._group)
        try:
            self.servers.post("/destroy_weights_update_group", {"group_name": GROUP})
        except WeightSyncError:
            pass  # the server is gone, and its side of the group with it

    def _together(self, collective: Any, path: str, bodies: Sequence[dict[str, Any]]) -> Any:
        """Runs our side of a collective while the servers run theirs.

        A server's refusal ends it at once, though the thread of the collective may wait on until
        its own timeout: threads are not joined then.
        """
        pool = ThreadPoolExecutor(2)
        ours: Future[Any] = pool.submit(collective)
        theirs = pool.submit(self.servers.post_each, path, bodies)
        try:
            wait((ours, theirs), self._timeout, FIRST_EXCEPTION)
            if theirs.done() or not ours.done():
                theirs.result(0)
            return ours.result(self._timeout)
        except (TimeoutError, RuntimeError) as error:  # c10d's errors are RuntimeErrors
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"{path}: the collective did not complete: {error!r}") from error
        finally:
            pool.shutdown(wait=False)


def _join(
    backend: str, address: str, port: int, world_size: int, timeout: float
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
        c10d.PrefixStore(GROUP, store),
        group_name=GROUP,
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
