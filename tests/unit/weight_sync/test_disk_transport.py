"""How long the folder of a push is there."""

from pathlib import Path
from typing import Any

from megavlm.weight_sync.transports.disk import CHANGED, PARTIAL, DiskTransport


class Servers:
    """Of several ranks each, that answer when the first of them has loaded."""

    live = ()

    def __init__(self) -> None:
        self.told: list[Path] = []

    def post_each(self, path: str, bodies: dict[str, Any]) -> None:
        self.told += [Path(body["model_path"]) for body in bodies.values()]


def push(transport: DiskTransport, servers: Any, name: str) -> None:
    transport.prepare()
    (transport.folder / PARTIAL / CHANGED / name).touch()
    servers.live = (type("Target", (), {"url": "a"}),)
    transport.commit(servers, [])


def test_a_folder_is_there_until_the_next_push(tmp_path: Path) -> None:
    """A rank of a server that looks late finds it."""
    transport, servers = DiskTransport(tmp_path), Servers()
    push(transport, servers, "first")
    (folder,) = servers.told
    assert [path.name for path in folder.iterdir()] == ["first"]
    push(transport, servers, "second")
    assert [path.name for path in folder.iterdir()] == ["second"]
    DiskTransport(tmp_path).close()  # another rank's
    assert folder.exists()
    transport.close()
    assert not list(tmp_path.iterdir())
