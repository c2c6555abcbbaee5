"""Fleets for tests, and what is done to them."""

import time
from collections.abc import Callable
from typing import Any

from megavlm.rollout.fleet.fleet import Fleet
from megavlm.rollout.fleet.member import Member
from megavlm.rollout.fleet.state import Policy, State
from tests.fakes.server import FakeServer

POLICY = Policy(max_restarts=2, back_off=0.1, max_failures=2, give_up_after=60)


def external(*fakes: FakeServer, **options: Any) -> Fleet:
    members = [Member(fake.url) for fake in fakes]
    return Fleet(members, **({"policy": POLICY, "say": lambda line: None} | options))


def push(fleet: Fleet, version: int, fakes: tuple[FakeServer, ...] = ()) -> list[str]:
    """What a weight push does to the fleet and, here, nothing else. Returns who got it."""
    targets = fleet.targets()
    for target in targets:
        for fake in fakes:
            if fake.url == target.url:
                fake.weight_version = str(version)
        fleet.refitted(target.url, str(version))
    return [target.url for target in targets]


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(fleet: Fleet, url: str) -> State:
    return fleet.record(url).state
