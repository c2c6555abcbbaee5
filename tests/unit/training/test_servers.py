"""A managed server that dies in mid-run: its end and its log are the reason that the user reads."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megavlm.config.load import load
from megavlm.rollout.errors import RolloutServerError, WeightSyncError
from megavlm.training import servers


class Server:
    """A server that is dead, or not."""

    url, api_key, admin_key = "http://127.0.0.1:9", "reads", "writes"

    def __init__(self, dead: bool) -> None:
        self.dead = dead
        self.left = False

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.left = True

    def check(self) -> None:
        if self.dead:
            raise RolloutServerError("ended with exit code -9; the end of the log: out of memory")


@pytest.mark.parametrize("error", [RolloutServerError("no answer"), WeightSyncError("refused")])
@pytest.mark.parametrize("dead", [True, False])
def test_a_dead_server_is_the_reason(
    write_recipe: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, dead: bool
) -> None:
    server = Server(dead)
    transport = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(servers, "ManagedServer", lambda *_, **__: server)
    monkeypatch.setattr(servers, "_transport", lambda *_: transport)
    with pytest.raises(type(error) if not dead else RolloutServerError) as raised:
        with servers.connect(load(write_recipe()), Path("model")):
            raise error
    assert ("out of memory" in str(raised.value)) == dead
    assert server.left
