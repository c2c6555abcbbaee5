"""Lifetime of the folder of a weight update."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megavlm.inference.server_pool.receivers import Receiver
from megavlm.weight_sync.transports.disk import CHANGED, PARTIAL, DiskTransport
from megavlm.weight_sync.update import SyncAttempt

ATTEMPT = SyncAttempt((Receiver("a", 2, "cpu", needs_all=False),), {}, (), ())


class Servers:
    """Servers of several ranks each, which answer when the first of them has loaded."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def request_each(self, path: str, bodies: dict[str, Any]) -> None:
        self.folders += [Path(body["model_path"]) for body in bodies.values()]


def update(transport: DiskTransport, servers: Any, name: str) -> None:
    delivery = transport.open(servers, ATTEMPT)
    (transport.folder / PARTIAL / CHANGED / name).touch()
    delivery.complete()


def test_a_folder_is_there_until_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of a server that looks late finds it."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
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
