"""Requests through a router, whose place a fake server takes."""

from typing import Any

import pytest

from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.router import BehindRouter
from megavlm.inference.server_pool.state import RestartPolicy, State
from tests.fakes.server import FakeServer
from tests.support.generation import generate
from tests.support.prompts import make_prompt

NO_DELAY = RequestLimits(retry_delay=0.0)
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=4)


def push(pool: ServerPool, version: str, *fakes: FakeServer) -> None:
    for receiver in pool.receivers():
        pool.refitted(receiver.url, version)
    for fake in fakes:
        fake.weight_version = version


def ask(client: RolloutClient, version: str, **options: Any) -> list[Any]:
    prompts = [make_prompt(first_id=i) for i in range(3)]
    return generate(
        client, prompts, n=2, sampling_params=SAMPLING, weight_version=version, **options
    )


def test_requests_go_to_the_router_and_weights_to_the_servers() -> None:
    with FakeServer() as a, FakeServer() as b, FakeServer() as front:
        handles = [ServerHandle(a.url), ServerHandle(b.url)]
        with ServerPool(handles, policy=RestartPolicy()) as pool:
            routing = BehindRouter(pool, front.url, "reads")
            with RolloutClient(routing, NO_DELAY) as client:
                assert routing.routable("1") == []
                push(pool, "1", a, b)
                groups = ask(client, "1")
                assert [tuple(group[0].token_ids) for group in groups] == [(0, 0), (1, 0), (2, 0)]
                assert set(front.paths()) == {"/generate"}
                assert front.requests[0][2] == "Bearer reads"
                assert "/generate" not in a.paths() + b.paths()


@pytest.mark.parametrize("trouble", ["one is behind", "the router's answer is"])
def test_none_of_the_servers_may_be_behind(trouble: str) -> None:
    with FakeServer() as a, FakeServer() as b, FakeServer() as front:
        handles = [ServerHandle(a.url), ServerHandle(b.url)]
        with ServerPool(handles, policy=RestartPolicy()) as pool:
            routing = BehindRouter(pool, front.url, None)
            with RolloutClient(routing, NO_DELAY) as client:
                push(pool, "2", a, b)
                if trouble == "one is behind":
                    pool.failed(a.url, "refused")
                    assert routing.routable("2") == []
                refits: list[set[State]] = []

                def refit() -> None:
                    refits.append({pool.record(url).state for url in pool.handles})
                    push(pool, "2", a, b, front)

                groups = ask(client, "2", refit=refit)
                assert {r.weight_version for group in groups for r in group} == {"2"}
                assert State.STALE in refits[0]
