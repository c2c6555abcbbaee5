"""The rollout servers of a run, as the driver sees them: started here, or started elsewhere and
given by address.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megavlm.config.schema import Config
from megavlm.inference.client import RolloutClient
from megavlm.inference.placement import keeps_weights, managed_servers
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.memory import ServerMemory
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.requirements import Requirements
from megavlm.inference.server_pool.router import BehindRouter
from megavlm.inference.server_pool.state import Policy
from megavlm.models.options import trains_tower

# Keys of servers that were started elsewhere; never in a recipe, which is written to the run
# directory.
API_KEY, ADMIN_KEY = "MEGAVLM_ROLLOUT_API_KEY", "MEGAVLM_ROLLOUT_ADMIN_KEY"


@dataclass(frozen=True)
class Connection:
    client: RolloutClient
    server_pool: ServerPool
    memory: ServerMemory | None = None  # where they share the trainer's GPUs


@contextmanager
def connect(
    config: Config, model_folder: str | Path, *, needs_refit: bool = True
) -> Iterator[Connection]:
    """Connects to `rollout.urls`, or runs servers of `model_folder` for as long as the context.

    needs_refit: whether they get requests only after a push; else they serve what they started
    with.
    """
    rollout = config.rollout
    policy = Policy(
        max_restarts=rollout.max_restarts,
        give_up_after=rollout.start_timeout,
        needs_refit=needs_refit,
    )
    server_pool = ServerPool(
        handles(config, model_folder, needs_refit=needs_refit),
        policy=policy,
        min_servers=rollout.min_servers,
        start_timeout=rollout.start_timeout,
        say=lambda line: print(line, flush=True),
    )
    with server_pool, _client(config, server_pool) as client:
        if not rollout.colocate:
            yield Connection(client, server_pool)
            return
        with ServerMemory(
            server_pool, keeps_weights=keeps_weights(rollout), timeout=rollout.request_timeout
        ) as memory:
            if needs_refit:  # a trainer is about to take the memory
                memory.release(["kv_cache", "weights"])
            yield Connection(client, server_pool, memory)


def handles(
    config: Config, model_folder: str | Path, *, needs_refit: bool = True
) -> Sequence[ServerHandle]:
    rollout = config.rollout
    if rollout.mode == "managed":
        return [ServerHandle.managed(server) for server in managed_servers(config, model_folder)]
    keys = os.environ.get(API_KEY), os.environ.get(ADMIN_KEY)
    required = Requirements(
        fresh_images=needs_refit and trains_tower(config),
        fresh_prefixes=needs_refit and rollout.pause == "in_place",
    )
    return [ServerHandle(url.rstrip("/"), *keys, required=required) for url in rollout.urls]


def _client(config: Config, server_pool: ServerPool) -> RolloutClient:
    rollout, timeout = config.rollout, config.rollout.request_timeout
    if rollout.router is None:
        return RolloutClient(server_pool, timeout=timeout, concurrency=rollout.concurrency)
    routing = BehindRouter(server_pool, rollout.router, os.environ.get(API_KEY))
    together = rollout.concurrency * len(rollout.urls)
    return RolloutClient(routing, timeout=timeout, concurrency=together)
