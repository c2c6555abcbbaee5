"""Lifetime of the folder of a weight update."""

from pathlib import Path
from typing import Any

import torch

from megavlm.inference.server_pool.receivers import Receiver
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.transports.base import Sending
from megavlm.weight_sync.transports.disk import CHANGED, PARTIAL, DiskTransport
from megavlm.weight_sync.update import SyncAttempt, SyncSettings

ATTEMPT = SyncAttempt((Receiver("a", 2, "cuda", needs_all=False),), {}, ("a",), (), "1")


class Servers:
    """Servers of several ranks each, which answer when the first of them has loaded."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

        self.live: list[Receiver] = []

    def request_each(self, path: str, bodies: dict[str, Any]) -> Any:
        self.folders += [Path(body["model_path"]) for body in bodies.values()]
        return {}

    def read(self, path: str, answers: Any, part: Any) -> Any:
        return {}


def update(transport: DiskTransport, servers: Any, name: str) -> None:
    transport.prepare(servers, ATTEMPT)
    (transport.folder / PARTIAL / CHANGED / name).touch()
    plan = SyncPlan([], TrainerRanks(), frozenset())
    settings = SyncSettings(torch.float32)
    transport.complete(Sending(plan, {}, settings, ATTEMPT, servers), [])


def test_a_folder_is_there_until_the_next_update(tmp_path: Path) -> None:
    """A rank of a server that looks late finds it."""
    transport, servers = DiskTransport(tmp_path), Servers()
    update(transport, servers, "first")
    (folder,) = servers.folders
    assert [path.name for path in folder.iterdir()] == ["first"]
    update(transport, servers, "second")
    assert [path.name for path in folder.iterdir()] == ["second"]
    DiskTransport(tmp_path).close()  # another rank's
    assert folder.exists()
    transport.close()
    assert not list(tmp_path.iterdir())
