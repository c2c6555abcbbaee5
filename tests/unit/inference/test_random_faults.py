"""Twenty random faults in fifty steps: each prompt is answered once, by the weights of its step."""

import random
from collections import Counter
from typing import get_args

import pytest

from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server_pool import supervisor
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import RestartPolicy
from tests.fakes.server import FakeServer, Fault
from tests.support.generation import generate
from tests.support.levels import slow
from tests.support.prompts import make_prompt
from tests.support.timeouts import scaled

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=300)  # a request for each prompt
STEPS, FAULTS, PROMPTS = 50, 20, 6
KINDS = [*(fault for fault in get_args(Fault) if fault != "400"), "other weights", "aborted"]


def push(pool: ServerPool, version: int, fakes: dict[str, FakeServer]) -> None:
    for receiver in pool.receivers():
        fakes[receiver.url].weight_version = str(version)
        pool.refitted(receiver.url, str(version))


def break_(fake: FakeServer, kind: str, step: int) -> None:
    if kind == "other weights":
        fake.weight_version = "default"
    elif kind == "aborted":
        fake.held = {PROMPTS * step}
        fake.held_once = True
        fake.aborted.set()
    else:
        fake.script.append(kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_the_ledger_has_no_gap_and_no_double(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TICK", 0.01)
    rng = random.Random(seed)
    faults: dict[int, list[str]] = {}
    for step in rng.sample(range(STEPS), FAULTS):
        faults[step] = [rng.choice(KINDS)]
    ledger: Counter[tuple[int, int]] = Counter()
    with FakeServer(only_generate=True) as a, FakeServer(only_generate=True) as b:
        fakes = {fake.url: fake for fake in (a, b)}
        with ServerPool([ServerHandle(url) for url in fakes], policy=RestartPolicy()) as pool:
            limits = RequestLimits(total=scaled(1.0), body=scaled(0.5), retry_delay=0.0)
            with RolloutClient(pool, limits) as client:
                for step in range(STEPS):
                    push(pool, step, fakes)
                    for kind in faults.get(step, ()):
                        break_(rng.choice([a, b]), kind, step)
                    prompts = [make_prompt(first_id=PROMPTS * step + i) for i in range(PROMPTS)]
                    groups = generate(
                        client,
                        prompts,
                        n=2,
                        sampling_params=SAMPLING,
                        weight_version=step,
                        refit=lambda step=step: push(pool, step, fakes),
                    )
                    for prompt, group in zip(prompts, groups, strict=True):
                        assert len(group) == 2
                        for response in group:
                            assert {span.version for span in response.spans} == {str(step)}
                            assert prompt.short_ids[0] in response.token_ids
                            ledger[step, prompt.row.index] += 1
    assert set(ledger.values()) == {2} and len(ledger) == STEPS * PROMPTS
