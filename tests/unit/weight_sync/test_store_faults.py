"""Seeded faults of servers that come and go at a store of weights: no token is recorded under a
version by whose weights it was not sampled, which is seen from the log-prob that the version's
weights give it, and nothing hangs.
"""

import json
import random
import shutil
import time
import zlib
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from megavlm.inference.client import RolloutClient
from megavlm.inference.errors import TrainerFault
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server_pool import supervisor
from megavlm.inference.server_pool.changes import ask_for
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import RestartPolicy, State
from megavlm.training.weight_push import WeightPusher
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.transports import chain
from megavlm.weight_sync.transports.chain import ChainTransport
from megavlm.weight_sync.update import SyncSettings
from tests.fakes.engine import FakeEngine
from tests.support.fork import launch
from tests.support.generation import generate
from tests.support.prompts import make_prompt
from tests.support.timeouts import scaled
from tests.unit.weight_sync.test_slices import HEADS, SHAPES, Model, grown, make_plan, stored

STEP, PUSHES, PROMPTS = 29, 8, 6
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=300)  # a request for each prompt
KINDS = (
    "add", "remove", "killed", "killed in a chain", "lost", "corrupted", "torn", "slow", "full",
    "gone", "another run",
)  # fmt: skip


def logprob(ranks: list[dict[str, Tensor]]) -> float:
    """Return the log-prob of a response's first token by the weights of a server's ranks, which
    each bit of them changes.
    """
    digest = 0
    for of_rank in ranks:
        for name in sorted(of_rank):
            digest = zlib.crc32(of_rank[name].contiguous().numpy().tobytes(), digest)
    return -(digest % 2**23) / 2**10  # exact in float32


class Server(FakeEngine):
    """One whose answers depend on the weights that it has."""

    def _item(self, *args: Any, **options: Any) -> Any:
        held = [{name: x.data for name, x in rank.named_parameters()} for rank in self.ranks]
        self.logprob = logprob(held)
        return super()._item(*args, **options)

    def restart(self) -> None:
        """Lose what the process had."""
        for rank, module in zip(self.ranks, self._modules, strict=True):
            module._loaded.clear()
            module._plans.clear()
            for _, parameter in rank.named_parameters():
                parameter.data.fill_(3.0)
        self.weight_version = "default"


class Faults:
    def __init__(self, rng: random.Random, folder: Path, servers: list[Server]) -> None:
        self.rng, self.folder, self.servers = rng, folder, servers
        self.store = folder / "store"
        self.made: Counter[str] = Counter()
        self.delay = 0.0
        self.is_full = False

    def make(self, transport: ChainTransport) -> None:
        server, kind = self.rng.choice(self.servers), self.rng.choice(KINDS)
        self.made[kind] += 1
        files = sorted(path for path in self.store.rglob("[0-9]*.*") if path.stat().st_size)
        match kind:
            case "lost" | "corrupted" | "torn" if files:
                self.damage(kind, self.rng.choice(files))
                server.restart()  # so that it reads the whole chain
            case "add" | "remove":
                ask_for(self.folder, server.url, kind)
            case "killed":
                server.restart()
            case "killed in a chain":  # it has loaded a part of the links, and forgets them
                for module in server._modules:
                    module._loaded[:] = []
                server.weight_version = "default"
                for _, parameter in server.ranks[0].named_parameters():
                    parameter.data.add_(1.0)
            case "slow":
                self.delay = 0.02
            case "full":
                self.is_full = True
            case "gone":
                shutil.rmtree(self.store, ignore_errors=True)
            case "another run":
                (self.store / "owner.json").parent.mkdir(exist_ok=True)
                (self.store / "owner.json").write_text(json.dumps({"run": "another"}))

    def damage(self, kind: str, path: Path) -> None:
        content = bytearray(path.read_bytes())
        if kind == "lost":
            path.unlink()
        elif kind == "corrupted":
            content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(content)
        else:
            path.write_bytes(content[: -self.rng.randint(1, 9)])

    def write(self, original: Any, path: str, content: bytes) -> None:
        time.sleep(self.delay)
        if self.is_full and self.rng.random() < 0.3:
            self.is_full = False
            raise OSError(28, "No space left on device")
        original(path, content)


def play(seed: int, folder: Path) -> tuple[int, Counter[str], list[str]]:
    """Return the number of checked responses, the faults, and the lines of the log."""
    supervisor.TICK, supervisor.CHANGES_EVERY = 0.005, 0.02  # type: ignore[misc]
    chain.MOST_LINKS = 3  # type: ignore[misc]
    rng, lines = random.Random(seed), list[str]()
    policy = RestartPolicy(max_missed=100, max_mismatches=100, health_check_timeout=5.0)
    limits = RequestLimits(total=scaled(20.0), body=scaled(10.0), retry_delay=0.0)
    plan = make_plan(1)
    count = 0
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(SHAPES)) for _ in range(3)]
        handles = [ServerHandle(server.url) for server in servers[:2]]
        joining = partial(ServerHandle, is_added=True)
        pool = stack.enter_context(
            ServerPool(handles, policy, lines.append, folder / "servers.json", joining=joining)
        )
        client = stack.enter_context(RolloutClient(pool, limits))
        model = Model(plan)
        faults = Faults(rng, folder, servers)

        def start() -> tuple[WeightPusher, ChainTransport, Any]:
            """Start the run, or start it again."""
            transport = ChainTransport(str(folder / "store"), "run", timeout=scaled(10))
            transport._fs = LocalFileSystem(skip_instance_cache=True)  # not that of the servers
            transport._fs.pipe_file = partial(faults.write, transport._fs.pipe_file)
            sync = WeightSync(
                plan,
                [model],  # type: ignore[list-item]
                transport,
                SyncSettings(torch.float32, HEADS, timeout=scaled(20), bucket_bytes=2048),
                receivers=pool,
            )
            assert sync._coordinator is not None
            pool.catch_up_by(sync._coordinator.catch_up)
            state = SimpleNamespace(step=0, mesh=SimpleNamespace(objects=None))
            return WeightPusher(state, sync, pool, None), transport, state  # type: ignore[arg-type]

        pusher, transport, state = start()

        def push(version: int) -> None:
            nonlocal pusher, transport, state
            while True:
                state.step = version
                try:
                    pusher.push()
                    return
                except TrainerFault as fault:  # the run would end, and resume at this step
                    lines.append(str(fault))
                    (folder / "store/owner.json").unlink(missing_ok=True)
                    pusher, transport, state = start()

        for version in range(1, PUSHES + 1):
            for parameter in model.parameters():
                grown(parameter.data, 1, STEP)
            faults.make(transport)
            push(version)
            if rng.random() < 0.5:
                faults.make(transport)
            expected = logprob(stored(version, STEP))
            prompts = [make_prompt(first_id=PROMPTS * version + i) for i in range(PROMPTS)]
            groups = generate(
                client,
                prompts,
                n=2,
                sampling_params=SAMPLING,
                weight_version=version,
                refit=lambda version=version: push(version),
            )
            for prompt, group in zip(prompts, groups, strict=True):
                assert len(group) == 2
                for response in group:
                    assert {span.version for span in response.spans} == {str(version)}
                    assert prompt.short_ids[0] in response.token_ids
                    assert response.logprobs[0] == expected, f"{faults.made}, version {version}"
                    count += 1
            faults.delay = 0.0
        pool.wait_while(State.SUSPECT)
    return count, faults.made, lines


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(i, marks=pytest.mark.long) for i in range(12, 200))]
)
def test_tokens_are_of_the_weights_of_their_version(seed: int, tmp_path: Path) -> None:
    ((count, made, _),) = launch(1, play, seed, tmp_path)
    assert count == PUSHES * PROMPTS * 2 and sum(made.values()) >= PUSHES
