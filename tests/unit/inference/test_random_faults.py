"""Three servers fail, join and leave at random: each prompt is answered by the weights of its step,
and no token is recorded under a version by whose weights it was not sampled.
"""

import random
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server_pool import supervisor
from megavlm.inference.server_pool.changes import ask_for
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import LEFT, RestartPolicy
from tests.fakes.server import FakeServer, Fault
from tests.support.generation import generate
from tests.support.prompts import make_prompt
from tests.support.timeouts import scaled

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=300)  # a request for each prompt
PROMPTS = 6
# Of a random server. A "replaced" one has other weights, and says that they are those of the step,
# as a server of another run might.
COMING_AND_GOING = ("add", "remove", "push fails", "other weights", "replaced", "aborted")
FAULTS = [*COMING_AND_GOING, *(fault for fault in get_args(Fault) if fault != "400")]


def weights_of(version: int) -> float:
    """Log-prob of a response's first token by the weights of a version."""
    return -1.0 - version


class Changes:
    """Three servers, of which two are named at first, with a fault before or in each step."""

    def __init__(self, seed: int, folder: Path, fakes: list[FakeServer], pool: ServerPool) -> None:
        self.rng, self.folder, self.pool = random.Random(seed), folder, pool
        self.fakes = {fake.url: fake for fake in fakes}
        self.failing: set[str] = set()

    def fault(self, step: int) -> None:
        fake, kind = self.rng.choice([*self.fakes.values()]), self.rng.choice(FAULTS)
        match kind:
            case "add" | "remove":
                ask_for(self.folder, fake.url, kind)
            case "push fails":
                self.failing.add(fake.url)
            case "other weights":
                fake.weight_version, fake.logprob = "default", 0.0
            case "replaced":
                ask_for(self.folder, fake.url, "remove")
                time.sleep(5 * supervisor.CHANGES_EVERY)
                if fake.url in self.pool.handles and self.pool.record(fake.url).state in LEFT:
                    fake.weight_version, fake.logprob = str(step), 0.0
                ask_for(self.folder, fake.url, "add")
            case "aborted":
                fake.held, fake.held_once = {PROMPTS * step}, True
                fake.aborted.set()
            case _:
                fake.script.append(kind)

    def push(self, version: int) -> None:
        """Push as WeightPusher does: again, until one server has the weights."""
        self.pool.wait_for_receivers()
        receivers = self.pool.receivers()
        if self.rng.random() < 0.3:
            self.fault(version)  # a change during the push
        for receiver in receivers:
            if receiver.url in self.failing:
                self.failing.remove(receiver.url)
                self.pool.failed(receiver.url, "as scripted")
            else:
                fake = self.fakes[receiver.url]
                fake.weight_version, fake.logprob = str(version), weights_of(version)
                self.pool.refitted(receiver.url, str(version))


@pytest.mark.parametrize("seed", range(6))
def test_no_token_is_recorded_under_a_version_that_did_not_sample_it(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "TICK", 0.005)
    monkeypatch.setattr(supervisor, "CHANGES_EVERY", 0.01)
    policy = RestartPolicy(back_off=0.1, max_missed=100, start_timeout=scaled(60))
    limits = RequestLimits(total=scaled(1.0), body=scaled(0.5), retry_delay=0.0)
    states = tmp_path / "servers.json"
    with ExitStack() as stack:
        fakes = [stack.enter_context(FakeServer(only_generate=True)) for _ in range(3)]
        handles = [ServerHandle(fake.url) for fake in fakes[:2]]
        added = partial(ServerHandle, is_added=True)
        pool = stack.enter_context(
            ServerPool(handles, policy, lambda line: None, states, joining=added)
        )
        client = stack.enter_context(RolloutClient(pool, limits))
        changes = Changes(seed, tmp_path, fakes, pool)
        for step in range(12):
            changes.fault(step)
            changes.push(step)
            prompts = [make_prompt(first_id=PROMPTS * step + i) for i in range(PROMPTS)]
            groups = generate(
                client,
                prompts,
                n=2,
                sampling_params=SAMPLING,
                weight_version=step,
                refit=lambda step=step: changes.push(step),
            )
            for prompt, group in zip(prompts, groups, strict=True):
                assert len(group) == 2
                for response in group:
                    assert {span.version for span in response.spans} == {str(step)}
                    assert prompt.short_ids[0] in response.token_ids
                    assert response.logprobs[0] == weights_of(step), "of the version's weights"
