"""SIGKILL of the real server in the middle of a push: the fleet starts it again, it is stale, and
the next push brings it everything.
"""

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megavlm.data.processor import Processor
from megavlm.families import family_of
from megavlm.inference.client import RolloutClient
from megavlm.inference.errors import WeightSyncError
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import RestartPolicy, State
from tests.conftest import DATA
from tests.fakes.transports import WatchedTransport
from tests.parity.reference import Reference
from tests.sglang.conftest import Served
from tests.sglang.pushes import Trainer, changed, make_sync
from tests.sglang.questions import largest_difference, prompts
from tests.support.fork import launch
from tests.support.forked_servers import forking_servers
from tests.support.generation import generate
from tests.support.timeouts import scaled

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]
START = scaled(600)  # seconds


def killed_and_healed(
    folder: Path, trainer: Trainer, log: Path, how: SamplingParams
) -> dict[str, Any]:
    """What the push said, and responses after the one that healed."""
    server = ManagedServer(
        ServerOptions(folder, dtype="float32", device="cpu"), log_path=log, start_timeout=START
    )
    policy = RestartPolicy(max_restarts=2, start_timeout=START, needs_refit=True)
    mesh, entries, chunks = trainer.start()
    buckets = itertools.count()

    def kill_after_first() -> None:
        if next(buckets) == 1:
            assert server._process is not None
            os.killpg(server._process.pid, signal.SIGKILL)

    with ServerPool([ServerHandle.managed(server)], policy=policy) as pool:
        way = WatchedTransport(kill_after_first)
        sync = make_sync(trainer, mesh, entries, chunks, pool, way)
        with pytest.raises(WeightSyncError, match="weight update to version 1 failed") as raised:
            sync.update_weights(1)
        assert not pool.routable(None), "no request goes to it"
        deadline = time.monotonic() + START
        # Suspect at once, as the push failed; then found dead; stale when it answers anew.
        for state in (State.DEAD, State.STALE):
            while pool.record(server.url).state is not state:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert not pool.routable(None)
        report = sync.update_weights(2)
        questions = [*prompts(Processor(folder, DATA, family_of(folder))).values()]
        client = RolloutClient(pool)
        groups = generate(client, questions, n=1, sampling_params=how, weight_version=2)
        client.close()
        return {"error": str(raised.value), "tensors": report.tensors, "groups": groups}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_in_mid_push(folder: Path, started: Served, tmp_path: Path) -> None:
    weights = changed(folder, tmp_path / "weights", tower=True, seed=31)
    how = SamplingParams(1.0, 8, suppressed_ids=tuple(started.processor.suppressed_ids))
    arguments = (folder, Trainer(weights, "one rank"), tmp_path / "server.log", how)
    with forking_servers():
        (result,) = launch(1, killed_and_healed, *arguments, timeout=3 * START)
    assert "/update_weights_from_tensor failed" in result["error"]
    reference, by_name = Reference(weights), prompts(started.processor)
    for prompt, responses in zip(by_name.values(), result["groups"], strict=True):
        assert largest_difference(reference, prompt, responses, how) < 1e-4
    assert result["tensors"] > 60, "the tower's, which is frozen, too"
