"""Requests through a router, whose place a fake server takes."""

from typing import Any

import pytest

from megavlm.rollout.client import RolloutClient
from megavlm.rollout.fleet.fleet import Fleet
from megavlm.rollout.fleet.member import Member
from megavlm.rollout.fleet.router import BehindRouter
from megavlm.rollout.fleet.state import Policy, State
from megavlm.rollout.messages import Sampling
from tests.fakes.server import FakeServer
from tests.unit.rollout.prompts import make_prompt

SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)


def push(fleet: Fleet, version: str, *fakes: FakeServer) -> None:
    for target in fleet.targets():
        fleet.refitted(target.url, version)
    for fake in fakes:
        fake.weight_version = version


def ask(client: RolloutClient, version: str, **options: Any) -> list[Any]:
    prompts = [make_prompt(first_id=i) for i in range(3)]
    return client.generate(prompts, n=2, sampling=SAMPLING, weight_version=version, **options)


def test_requests_go_to_the_router_and_weights_to_the_servers() -> None:
    with FakeServer() as a, FakeServer() as b, FakeServer() as front:
        members = [Member(a.url), Member(b.url)]
        with Fleet(members, policy=Policy(), say=print) as fleet:
            routing = BehindRouter(fleet, front.url, "reads")
            with RolloutClient(routing, retry_delay=0.0) as client:
                assert routing.routable("1") == []
                push(fleet, "1", a, b)
                groups = ask(client, "1")
                assert [group[0].token_ids for group in groups] == [(0, 0), (1, 0), (2, 0)]
                assert set(front.paths()) == {"/generate"}
                assert front.requests[0][2] == "Bearer reads"
                assert "/generate" not in a.paths() + b.paths()


@pytest.mark.parametrize("trouble", ["one is behind", "the router's answer is"])
def test_none_of_the_servers_may_be_behind(trouble: str) -> None:
    with FakeServer() as a, FakeServer() as b, FakeServer() as front:
        members = [Member(a.url), Member(b.url)]
        with Fleet(members, policy=Policy(), say=print) as fleet:
            routing = BehindRouter(fleet, front.url, None)
            with RolloutClient(routing, retry_delay=0.0) as client:
                push(fleet, "2", a, b)
                if trouble == "one is behind":
                    fleet.failed(a.url, "refused")
                    assert routing.routable("2") == []
                refits: list[set[State]] = []

                def refit() -> None:
                    refits.append({fleet.record(url).state for url in fleet.members})
                    push(fleet, "2", a, b, front)

                groups = ask(client, "2", refit=refit)
                assert {r.weight_version for group in groups for r in group} == {"2"}
                assert State.STALE in refits[0]
