"""Connection of a run to its rollout servers: either servers that it starts, or running servers by
URL.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megavlm.config.algorithm import replays_routing
from megavlm.config.cross_rules import longest_session
from megavlm.config.rollout import Rollout
from megavlm.config.schema import Config
from megavlm.inference.client import RolloutClient
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server import HOST, ManagedServer, own_address
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool.changes import asked_changes, changed_urls
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.memory import TAGS, ServerMemory
from megavlm.inference.server_pool.nodes import (
    NodeServers,
    OtherNodes,
    RemoteServer,
    ServerDescription,
)
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.requirements import Requirements
from megavlm.inference.server_pool.router import BehindRouter
from megavlm.inference.server_pool.state import RestartPolicy
from megavlm.inference.server_process import ADMIN_KEY, API_KEY
from megavlm.observability.progress import Progress
from megavlm.observability.records import SERVERS_FILE
from megavlm.parallel import platform
from megavlm.parallel.watchdog import SERVERS_GROUP
from megavlm.process import allow_open_files

if TYPE_CHECKING:  # megatron-core, which commands without a model do not import
    from megavlm.parallel.mesh import Mesh

TOKEN_SECONDS = 0.1  # added to rollout.request_timeout per token of a response
IMAGE_TOKENS = {"cuda": 2**20, "cpu": 8192}  # rollout.image_tokens by device


@dataclass(frozen=True)
class Connection:
    """Connection to the rollout servers. memory: The servers' GPU memory; None unless they share
    GPUs with the trainer.
    """

    client: RolloutClient
    server_pool: ServerPool
    memory: ServerMemory | None = None


@contextmanager
def connect(
    config: Config,
    model_folder: str | Path,
    progress: Progress,
    *,
    needs_refit: bool = True,
    waits: bool = True,
    beat: Callable[[], object] = lambda: None,
    remote: Sequence[RemoteServer] = (),
) -> Iterator[Connection]:
    """Connect to `rollout.urls`, or run servers of `model_folder` within the context.

    progress: Shows the wait for servers and the progress of generation. needs_refit: Servers get
    requests only after a weight push if this is true. Otherwise they serve the weights that they
    started with, which are not quantised. waits: The context waits for the servers to start if this
    is true, and always with colocate=true. Otherwise the caller calls
    `server_pool.wait_for_starts`. beat: Callback for each response. remote: The servers that other
    nodes of the run start on their GPUs.
    """
    if not needs_refit:  # a quantised server would start without weights
        config = replace(config, rollout=replace(config.rollout, quantization=None))
    rollout = config.rollout
    policy = RestartPolicy(
        max_restarts=rollout.max_restarts,
        start_timeout=rollout.start_timeout,
        health_check_timeout=rollout.health_check_timeout,
        min_servers=rollout.min_servers,
        needs_refit=needs_refit,
        abort_leaving=rollout.pause_mode == "abort",
    )
    handles = server_handles(config, model_folder, remote, needs_refit=needs_refit)
    progress.begin(_waiting(config, len(handles)))
    states_file = Path(config.run.dir) / SERVERS_FILE
    waits = waits or rollout.colocate
    joining = None
    if rollout.takes_changes:
        joining = partial(external_server, config, needs_refit=needs_refit, is_added=True)
    server_pool = ServerPool(
        handles, policy, progress.line, states_file, waits=waits, joining=joining
    )
    with server_pool, _client(config, server_pool, progress.show, beat) as client:
        if not rollout.colocate:
            yield Connection(client, server_pool)
            return
        with ServerMemory(server_pool, rollout) as memory:
            if needs_refit:  # the trainer needs the memory first
                memory.release(TAGS)
            yield Connection(client, server_pool, memory)


def _waiting(config: Config, count: int) -> str:
    servers = f"{count} rollout server" + "s" * (count > 1)
    if config.rollout.mode == "external":
        return f"waiting for {servers}"
    return f"starting {servers}, which takes a minute or two (its log is in {config.run.dir})"


def _client(
    config: Config,
    server_pool: ServerPool,
    show: Callable[[str], object],
    beat: Callable[[], object],
) -> RolloutClient:
    allow_open_files()  # a request needs one, and so does each of its images
    rollout = config.rollout
    image_tokens = rollout.image_tokens or IMAGE_TOKENS[platform.device().type]
    servers = len(rollout.urls) if rollout.router is not None else 1  # servers behind one address
    limits = RequestLimits(
        total=rollout.request_timeout,
        token=TOKEN_SECONDS,
        concurrency=servers * rollout.concurrency,
        image_tokens=servers * image_tokens,
        session_tokens=longest_session(config),
    )
    if rollout.router is None:
        return RolloutClient(server_pool, limits, show, beat)
    router = BehindRouter(server_pool, rollout.router, os.environ.get(API_KEY))
    return RolloutClient(router, limits, show, beat)


def server_handles(
    config: Config,
    model_folder: str | Path,
    remote: Sequence[RemoteServer] = (),
    *,
    needs_refit: bool = True,
) -> Sequence[ServerHandle]:
    """Return handles of all servers. Raises ValueError if they are too few."""
    rollout = config.rollout
    if rollout.mode == "managed":
        nodes = 1 + len({server.node for server in remote})
        own = managed_servers(config, model_folder, num_nodes=nodes)
        servers: list[ManagedServer | RemoteServer] = [*own, *remote]
        rollout.check_servers(len(servers))
        return [ServerHandle.managed(server) for server in servers]
    urls = [url.rstrip("/") for url in rollout.urls]
    changes = asked_changes(Path(config.run.dir)) if rollout.takes_changes else {}
    changed = changed_urls(urls, changes)
    rollout.check_servers(len(changed))
    return [
        external_server(config, url, needs_refit=needs_refit, is_added=url not in urls)
        for url in changed
    ]


def external_server(config: Config, url: str, *, needs_refit: bool, is_added: bool) -> ServerHandle:
    """Return the handle of a server that was started elsewhere. is_added: See ServerHandle."""
    rollout, keys = config.rollout, (os.environ.get(API_KEY), os.environ.get(ADMIN_KEY))
    required = Requirements(
        fresh_images=needs_refit and config.trains_tower,
        sync=rollout.sync if needs_refit else None,
        routed_experts=needs_refit and replays_routing(config.algorithm),
        kept_tokens=rollout.top_k if needs_refit and rollout.samples_likeliest else 0,
        expert_adapters=rollout.lora == "adapter" and "language.experts" in config.lora.targets,
    )
    return ServerHandle(url, *keys, required=required, is_added=is_added)


@contextmanager
def servers_of_nodes(
    config: Config, model_folder: str | Path, mesh: "Mesh", timeout: timedelta
) -> Iterator[Sequence[RemoteServer]]:
    """Within the context, the first rank of each node but rank 0's runs the node's servers at rank
    0's orders. Yields all of them on rank 0, and nothing on other ranks. Collective.
    """
    firsts = range(0, mesh.world_size, mesh.ranks_per_node)
    # Recorded as a group of servers: the watchdog must not take its thread for a rank that waits.
    group = dist.new_group(list(firsts), timeout=timeout, backend="gloo", group_desc=SERVERS_GROUP)
    own: list[ManagedServer] = []
    if mesh.rank in firsts[1:]:
        own = managed_servers(config, model_folder, node=mesh.node, num_nodes=len(firsts))
    described = [ServerDescription.of(server, mesh.node) for server in own]
    gathered: list[Any] | None = [None] * mesh.world_size if mesh.is_driver else None
    dist.gather_object(described, gathered, dst=0, group=mesh.objects)
    with ExitStack() as stack:
        if gathered is not None:
            others = {rank: gathered[rank] for rank in firsts[1:]}
            yield stack.enter_context(OtherNodes(others, group)).servers
            return
        if own:
            stack.enter_context(NodeServers(own, group))
        yield ()


def managed_servers(
    config: Config, model_folder: str | Path, *, node: int = 0, num_nodes: int = 1
) -> list[ManagedServer]:
    """Return the servers of a node of the run, each with its GPUs, port and log. They are not
    launched yet.

    Raises ValueError if this machine has too few GPUs.
    """
    rollout, count = config.rollout, config.rollout.servers
    device = platform.device().type
    options = ServerOptions.from_config(config, model_folder, device, num_nodes=num_nodes)
    # Rank 0 sends all requests.
    host = own_address(os.environ["MASTER_ADDR"]) if node else HOST
    gpus = server_gpus(rollout, platform.num_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    of_node = f"_node{node}" if num_nodes > 1 else ""
    suffixes = [of_node + (f"_{index}" if count > 1 else "") for index in range(count)]
    return [
        ManagedServer(
            options,
            host=host,
            port=None if rollout.port is None else rollout.port + index,
            log_path=Path(config.run.dir) / f"rollout_server{suffixes[index]}.log",
            first_gpu=gpus[index],
            first_core=index * rollout.tensor_parallel,
            start_timeout=rollout.start_timeout,
        )
        for index in range(count)
    ]


def server_gpus(rollout: Rollout, num_gpus: int, num_trainers: int) -> Sequence[int]:
    """Return the first GPU of each server; 0 on a machine without GPUs if none are named.

    num_trainers: Number of trainer ranks on this machine; they use the first GPUs. Raises
    ValueError if the servers' GPUs do not exist, or are the trainer's without colocate=true.
    """
    size, needed = rollout.tensor_parallel, rollout.servers * rollout.tensor_parallel
    if num_gpus == 0 and not rollout.gpus:
        return [0] * rollout.servers
    if not rollout.gpus:
        rollout.check_node(num_gpus, "this machine")
    first = 0 if rollout.colocate else num_trainers
    gpus = rollout.gpus or tuple(range(first, first + needed))
    if max(gpus) >= num_gpus:
        raise ValueError(
            f"rollout.servers={rollout.servers} x rollout.tensor_parallel={size} would take GPUs "
            f"{list(gpus)}, but this machine has {num_gpus} and trains on {num_trainers}: "
            "lower one, set rollout.gpus, or rollout.colocate=true to share the trainer's"
        )
    if not rollout.colocate and min(gpus) < num_trainers:
        raise ValueError(
            f"rollout.gpus={list(rollout.gpus)} names GPUs of the {num_trainers} trainer ranks: "
            "set rollout.colocate=true to share them, or name others"
        )
    return gpus[::size]
