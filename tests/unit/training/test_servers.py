"""A managed server that dies in mid-run: its end and its log are the reason that the user reads."""

from pathlib import Path
from typing import Any

import pytest

from megavlm.config.load import load
from megavlm.rollout.errors import RolloutServerError, WeightSyncError
from megavlm.training import servers


@pytest.mark.parametrize(
    ("sections", "cached"),
    [
        ({}, True),
        ({"model": {"freeze_tower": False}}, False),
        ({"model": {"freeze_merger": False}}, False),
        ({"lora": {"rank": 2}}, True),
        ({"lora": {"rank": 2, "targets": ["language.mlp", "vision.merger"]}}, False),
        ({"lora": {"rank": 2, "targets": ["visual.blocks.0.attn.qkv"]}}, False),
        ({"lora": {"targets": ["vision.mlp"]}}, True),  # without a rank there are no adapters
    ],
)
def test_features_of_pictures_are_kept_while_the_tower_does_not_change(
    write_recipe: Any, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], cached: bool
) -> None:
    """SGLang never drops them when weights change."""
    given: list[bool] = []

    def start(*_: Any, cache_pictures: bool, **__: Any) -> Server:
        given.append(cache_pictures)
        return Server(dead=False)

    monkeypatch.setattr(servers, "ManagedServer", start)
    monkeypatch.setattr(servers.FixedTargets, "connect", lambda *_, **__: None)
    with servers.connect(load(write_recipe(**sections)), Path("model")):
        pass
    assert given == [cached]


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
    monkeypatch.setattr(servers, "ManagedServer", lambda *_, **__: server)
    monkeypatch.setattr(servers.FixedTargets, "connect", lambda *_, **__: None)
    with pytest.raises(type(error) if not dead else RolloutServerError) as raised:
        with servers.connect(load(write_recipe()), Path("model")):
            raise error
    assert ("out of memory" in str(raised.value)) == dead
    assert server.left
