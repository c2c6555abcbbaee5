"""The rollout servers of a run, as the driver sees them: started here, or started elsewhere and
given by address.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megavlm.config.schema import Config
from megavlm.parallel import platform
from megavlm.rollout.client import RolloutClient
from megavlm.rollout.errors import RolloutServerError, WeightSyncError
from megavlm.rollout.fleet.targets import Targets
from megavlm.rollout.server import ManagedServer
from megavlm.rollout.weights.fixed_targets import FixedTargets
from megavlm.training.options import trains_tower

# Keys of servers that were started elsewhere; never in a recipe, which is written to the run
# directory.
API_KEY, ADMIN_KEY = "MEGAVLM_ROLLOUT_API_KEY", "MEGAVLM_ROLLOUT_ADMIN_KEY"


@dataclass(frozen=True)
class Connection:
    client: RolloutClient
    targets: Targets


@contextmanager
def connect(config: Config, model_folder: str | Path) -> Iterator[Connection]:
    """Connects to `rollout.urls`, or runs a server of `model_folder` for as long as the context."""
    rollout = config.rollout
    if rollout.mode == "external":
        keys = os.environ.get(API_KEY), os.environ.get(ADMIN_KEY)
        yield _connection(config, list(rollout.urls), *keys)
        return
    server = ManagedServer(
        model_folder,
        dtype=config.model.dtype,
        device=platform.device().type,
        tensor_parallel=rollout.tensor_parallel,
        port=rollout.port,
        log_path=Path(config.run.dir) / "rollout_server.log",
        start_timeout=rollout.start_timeout,
        cache_pictures=not trains_tower(config),
        server_args=rollout.server_args,
    )
    with server:
        keys = server.api_key, server.admin_key
        try:
            yield _connection(config, [server.url], *keys)
        except (RolloutServerError, WeightSyncError):
            server.check()  # if it has died, that is the reason, and its log says why
            raise


def _connection(
    config: Config, urls: list[str], api_key: str | None, admin_key: str | None
) -> Connection:
    rollout = config.rollout
    client = RolloutClient(
        urls, api_key=api_key, timeout=rollout.request_timeout, concurrency=rollout.concurrency
    )
    targets = FixedTargets.connect(
        urls, api_key=api_key, admin_key=admin_key, timeout=rollout.request_timeout
    )
    return Connection(client, targets)
