"""A small world for whole runs: images, a tiny model, and the command line as a user has it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from megavlm.demo.data import DemoData
from megavlm.demo.shapes import write_dataset
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_process import ADMIN_KEY, API_KEY
from megavlm.observability.records import read_records
from tests.support.cache import cached_folder
from tests.support.forked import forking
from tests.support.forked_servers import forked
from tests.support.glossary import unexplained
from tests.support.timeouts import scaled

WAIT = scaled(500)  # seconds for a command; below pytest's own limit, so that its output is shown


@dataclass(frozen=True)
class World:
    root: Path
    tests: dict[str, str] = field(default_factory=dict, repr=False)  # that made each recipe

    def recipe(self, name: str, **sections: dict[str, Any]) -> Path:
        """A recipe of this world's model and data, which `sections` complete or change. Its name is
        also that of its run directory, which belongs to one test.
        """
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        assert self.tests.setdefault(name, test) == test, f"{self.tests[name]} has {name!r} too"
        data = {
            "train_files": [str(self.root / "data/train.parquet")],
            "test_files": [str(self.root / "data/test.parquet")],
            "max_prompt_tokens": 64,
            "pack_tokens": 512,
        }
        recipe: dict[str, Any] = {
            "run": {"dir": str(self.root / name)},
            "model": {"folder": str(self.root / "model")},
            "data": data,
        }
        for section, values in sections.items():
            recipe[section] = recipe.get(section, {}) | values
        path = self.root / f"{name}.yaml"
        path.write_text(json.dumps(recipe))  # JSON is YAML
        return path

    def megavlm(
        self, *words: str | Path, forks: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs the command; what it starts must be gone when it returns. forks: Fork it and its
        ranks (`tests/support/forked.py`); False if the test is about their start too.
        """
        with forking() if forks else nullcontext():
            done = subprocess.run(
                [sys.executable, "-m", "megavlm", *map(str, words)],
                capture_output=True,
                text=True,
                timeout=WAIT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        left = [p.cmdline() for p in psutil.process_iter() if str(self.root) in " ".join(_words(p))]
        assert not left, left
        return done

    def metrics(self, name: str) -> list[dict[str, Any]]:
        records = read_records(self.root / name / "metrics.jsonl")
        assert unexplained(set().union(*records)) == set(), "docs/reference/metrics.md lacks them"
        return records


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # ended meanwhile, or not ours to look at
        return []


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    made = cached_folder("world", None, make_world)
    for name in ("data", "model"):
        (root / name).symlink_to(made / name)
    return World(root)


def make_world(folder: Path) -> None:
    write_dataset(folder / "data", seed=0, num_train=48, num_test=12)
    files = (folder / "data" / f"{name}.parquet" for name in ("train", "test", "warm_start"))
    train, test, warm_start = files
    make_tiny_model(folder / "model", DemoData(train, test, warm_start, "task").texts(), seed=0)


@dataclass(frozen=True)
class Running:
    """A server that the group "runs" shares: each run pushes its own weights at its start."""

    rollout: dict[str, Any]  # keys of the recipe's section
    keys: dict[str, str]  # for the environment


@pytest.fixture(scope="session")
def running(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    model = (world.root / "model").resolve()  # not the run's, to end with it
    log = folder / "server.log"
    server = ManagedServer(ServerOptions(model, dtype="float32", device="cpu"), log_path=log)
    with forked(server):
        yield Running(
            {"mode": "external", "urls": [server.url], "sync": "tensor"},
            {API_KEY: server.api_key, ADMIN_KEY: server.admin_key},
        )
