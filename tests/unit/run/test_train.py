"""The order in which a run takes the memory of its devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megavlm.config.load import load
from megavlm.observability.progress import Progress
from megavlm.parallel.mesh import Layout
from megavlm.run import train as run


class Stop(Exception):
    """Ends the run where the model would be built."""


@pytest.mark.parametrize("colocate", [False, True])
def test_ranks_wait_for_servers_on_shared_gpus_before_they_build_the_model(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, colocate: bool
) -> None:
    """SGLang refuses GPUs whose free memory shrinks while it starts."""
    events = []

    @contextmanager
    def connect(*_: Any, waits: bool, **__: Any) -> Iterator[Any]:
        assert not waits, "servers on GPUs of their own start while the model is built"
        events.append("servers")
        yield SimpleNamespace(server_pool=None)

    def build(*_: Any) -> None:
        events.append("model")
        raise Stop

    def build_mesh(layout: Layout, *, seed: int) -> Any:
        return SimpleNamespace(is_driver=True, rank=0, world_size=1, ranks_per_node=1)

    monkeypatch.setattr(run, "init_distributed", lambda: None)
    monkeypatch.setattr(run, "build_mesh", build_mesh)
    monkeypatch.setattr(run, "own_store", HashStore)
    monkeypatch.setattr(run, "check_reachable_files", lambda _: events.append("files"))
    monkeypatch.setattr(run, "connect", connect)
    monkeypatch.setattr(run, "barrier", lambda _: events.append("all ranks wait"))
    monkeypatch.setattr(run.TrainState, "build", build)
    recipe = write_recipe(rollout={"colocate": colocate})
    config = load(recipe)
    with pytest.raises(Stop):
        run.train(config, Progress(is_quiet=True))
    waits = ["all ranks wait"] if colocate else []
    assert events == ["files", "servers", *waits, "model"]
    # A start that ends before it has resumed is not recorded as the last one.
    with pytest.raises(Stop):
        run.train(load(recipe, ["run.seed=9"]), Progress(is_quiet=True))
    assert "seed: 9" not in Path(config.run.dir, "config.yaml").read_text()
