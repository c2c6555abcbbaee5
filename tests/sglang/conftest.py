"""Real SGLang servers for all these tests, one for a family, on tiny models with random norms and
biases. Tests of the group "sglang" share them: one worker of pytest-xdist runs them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megavlm.data.processor import Processor
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from megavlm.inference.client import RolloutClient
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool.memory import FLUSH_CACHE
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.weight_sync.server_api import Servers, control_client
from tests.conftest import DATA
from tests.fakes.fixed_servers import FixedServers
from tests.sglang.questions import QUESTION
from tests.support.cache import cached_folder
from tests.support.families import model_type
from tests.support.forked_servers import forked
from tests.support.servers import run_server

PLAIN = "qwen2_5_vl"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring tests of one family together, so that its server starts once."""

    def family(item: pytest.Item) -> str:
        found = item.callspec.params.get("family", PLAIN) if hasattr(item, "callspec") else PLAIN
        return "" if found == PLAIN else found

    indices = [i for i, item in enumerate(items) if "servers" in getattr(item, "fixturenames", ())]
    for index, item in zip(indices, sorted((items[i] for i in indices), key=family), strict=True):
        items[index] = item


@dataclass(frozen=True)
class Served:
    """A model folder and the server that started on it."""

    folder: Path
    processor: Processor
    server: ManagedServer
    tensor_parallel: int = 1

    @property
    def client(self) -> RolloutClient:
        routing = FixedServers(self.server.url, api_key=self.server.api_key, is_local=True)
        return RolloutClient(routing)

    @property
    def receiver(self) -> Receiver:
        """Return a receiver that needs no frozen tensors."""
        server = self.server
        return Receiver(
            server.url,
            self.tensor_parallel,
            "cpu",
            needs_all=False,
            api_key=server.api_key,
            admin_key=server.admin_key,
            node=0,
        )

    def get(self, path: str) -> dict[str, Any]:
        with control_client() as http:
            return Servers([self.receiver], http=http).request(self.server.url, path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with control_client() as http:
            return Servers([self.receiver], http=http).request(self.server.url, path, body)

    def restore(self) -> "Served":
        """Load the folder's weights into the server, once its last requests have ended: an aborted
        one may still be in a batch when it is answered, and the load would be refused.
        """
        self.post(FLUSH_CACHE, {})
        self.post(
            "/update_weights_from_disk", {"model_path": str(self.folder), "weight_version": "start"}
        )
        return self


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Return a function from a family to its server. PLAIN's stays; of the others one
    runs at a time, for memory.
    """
    root = tmp_path_factory.mktemp("sglang")
    running: dict[str, Served] = {}
    with ExitStack() as plain, ExitStack() as others:

        def start(family: str) -> Served:
            if family in running:
                return running[family]
            if family != PLAIN:
                others.close()
                for other in running.keys() - {PLAIN}:
                    del running[other]
            folder, log = model_folder(family), root / f"{family}.log"
            server = ManagedServer(
                ServerOptions(folder, dtype="float32", device="cpu"), log_path=log
            )
            if family == PLAIN:  # as a user starts it
                plain.enter_context(run_server(server))
            else:
                others.enter_context(forked(server))
            processor = Processor(folder, DATA, family_of(folder))
            running[family] = Served(folder, processor, server)
            return running[family]

        yield start


def model_folder(family: str) -> Path:
    sizes = {
        "seed": 3,
        "family": model_type(family),
        **({"num_experts": 4} if family == "internvl_moe" else {}),
        "num_layers": 4 if family.startswith(("qwen3_5", "minicpmv")) else 2,
        "init_std": 0.05,
        "randomise_norms_and_biases": True,
        "max_vocab": 300,
        **({"full_attention_blocks": [1]} if family == PLAIN else {}),
    }
    texts = [QUESTION] * 10
    return cached_folder(
        "served", (texts, sizes), lambda folder: make_tiny_model(folder, texts, **sizes)
    )


@pytest.fixture(scope="session")
def started(servers: Callable[[str], Served]) -> Served:
    """Return a server, with the weights that the test before left in it."""
    return servers(PLAIN)


@pytest.fixture(scope="session")
def folder(started: Served) -> Path:
    return started.folder


@pytest.fixture
def served(started: Served) -> Served:
    return started.restore()
