"""One real SGLang server for all these tests, on a tiny model with random norms and biases."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megavlm.data.processor import Processor
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.rollout.client import RolloutClient
from megavlm.rollout.server import ManagedServer
from megavlm.rollout.weights.servers import Servers
from tests.sglang.questions import QUESTION


@dataclass(frozen=True)
class Served:
    """A model folder and the server that started on it."""

    folder: Path
    processor: Processor
    server: ManagedServer

    @property
    def client(self) -> RolloutClient:
        return RolloutClient([self.server.url], api_key=self.server.api_key)

    @property
    def control(self) -> Servers:
        return Servers(
            [self.server.url], api_key=self.server.api_key, admin_key=self.server.admin_key
        )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang") / "model"
    make_tiny_model(
        folder,
        [QUESTION] * 10,
        seed=3,
        num_layers=2,
        full_attention_blocks=[1],
        init_std=0.05,
        randomise_norms_and_biases=True,
        max_vocab=300,
    )
    return folder


@pytest.fixture(scope="session")
def started(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server, with whatever weights the test before left in it."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    processor = Processor(folder, min_pixels=None, max_pixels=None)
    with ManagedServer(folder, dtype="float32", device="cpu", log_path=log) as server:
        yield Served(folder, processor, server)


@pytest.fixture
def served(started: Served) -> Served:
    """The server, with the folder's weights."""
    started.control.post(
        "/update_weights_from_disk", {"model_path": str(started.folder), "weight_version": "start"}
    )
    return started
