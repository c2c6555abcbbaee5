"""Servers that join a run and leave it while it runs, as `megavlm servers` asks for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.dump import write
from megavlm.config.load import load
from megavlm.inference.client import RolloutClient
from megavlm.inference.connect import external_server, server_handles
from megavlm.inference.errors import RolloutServerError, ServersFailed
from megavlm.inference.protocol import Response, SamplingParams
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server import ClaimedPort
from megavlm.inference.server_pool import status, supervisor
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.inference.server_pool.state import RestartPolicy, State
from megavlm.observability.records import SERVERS_FILE
from megavlm.rollout.ahead.mirror import ServerProxy, ServerStates
from megavlm.run.servers import change_servers, list_servers
from tests.fakes.server import FakeServer
from tests.support.generation import generate
from tests.support.prompts import make_prompt
from tests.support.server_pools import POLICY, push, state, wait_for

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=300)  # a request for each prompt
LEFT = "has left the run and may be stopped"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TICK", 0.01)
    monkeypatch.setattr(supervisor, "CHANGES_EVERY", 0.02)
    monkeypatch.setattr(supervisor, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(status, "WRITE_EVERY", 0.02)


@pytest.fixture
def run_dir(tmp_path: Path, write_recipe: Any) -> Callable[..., Path]:
    """Return a run directory with the keys of a run at external servers."""

    def make(*urls: str, **keys: Any) -> Path:
        rollout = {"mode": "external", "urls": list(urls)} | keys
        write(load(write_recipe(rollout=rollout, run={"dir": str(tmp_path)})), tmp_path)
        return tmp_path

    return make


@contextmanager
def pool_of(
    folder: Path, policy: RestartPolicy = POLICY, lines: list[str] | None = None
) -> Iterator[ServerPool]:
    """Start a pool as `connect` does in a run, or in a resumed one."""
    config = load(folder / "config.yaml")

    def joining(url: str) -> ServerHandle:
        return external_server(config, url, needs_refit=True, is_added=True)

    handles = server_handles(config, "model")
    log = (lambda line: None) if lines is None else lines.append
    with ServerPool(handles, policy, log, folder / SERVERS_FILE, joining=joining) as pool:
        yield pool


def served_by(groups: list[list[Response]], *fakes: FakeServer) -> list[int]:
    assert all(len(group) == 2 for group in groups)
    return [sum(len(body["input_ids"]) for body in fake.bodies("/generate")) for fake in fakes]


def test_an_added_server_gets_the_weights_before_it_serves(run_dir: Callable[..., Path]) -> None:
    prompts = [make_prompt(first_id=i) for i in range(12)]
    with FakeServer() as a, FakeServer() as b, pool_of(folder := run_dir(a.url)) as pool:
        push(pool, 1, (a,))
        assert "gets the weights" in change_servers(folder, b.url + "/", "add")
        wait_for(lambda: b.url in pool.handles and state(pool, b.url) is State.STALE)
        assert [one.url for one in pool.routable(None)] == [a.url]
        assert [one.needs_all for one in pool.receivers()] == [False, True]
        assert push(pool, 2, (a, b)) == [a.url, b.url]
        with RolloutClient(pool) as client:
            groups = generate(client, prompts, n=2, sampling_params=SAMPLING, weight_version=2)
    assert all(served_by(groups, a, b))


def test_an_added_server_that_does_not_fit_is_refused_aloud(run_dir: Callable[..., Path]) -> None:
    lines: list[str] = []
    policy = replace(POLICY, start_timeout=0.3)
    with FakeServer() as a, FakeServer() as b, FakeServer() as c:
        b.info = {"version": "0.5.4"}
        with pool_of(folder := run_dir(a.url), policy, lines) as pool:
            for late in (b, c):
                change_servers(folder, late.url, "add")
            wait_for(lambda: c.url in pool.handles and state(pool, c.url) is State.STALE)
            wait_for(lambda: state(pool, b.url) is State.AWAY)
            assert push(pool, 1, (a, c)) == [a.url, c.url]
            b.info = {}
            wait_for(lambda: state(pool, b.url) is State.STALE)
    told = [line for line in lines if "0.5.4, but 0.5.21 to 0.5.23 are supported" in line]
    assert told[0].startswith(f"rollout server {b.url} is refused ({b.url} runs SGLang 0.5.4")


@pytest.mark.parametrize("aborts", [False, True])
def test_a_removed_server_ends_its_requests_or_hands_them_over(
    run_dir: Callable[..., Path], aborts: bool
) -> None:
    """The tokens of aborted responses are kept: another server goes on with them."""
    lines: list[str] = []
    prompts = [make_prompt(first_id=i) for i in range(12)]
    policy = replace(POLICY, abort_leaving=aborts)
    with FakeServer() as a, FakeServer() as b:
        if aborts:
            a.held = set(range(12))
        else:
            a.gate.clear()
        with pool_of(folder := run_dir(a.url, b.url), policy, lines) as pool:
            push(pool, 1)

            def leave() -> None:
                wait_for(lambda: a.num_running)
                change_servers(folder, a.url, "remove")
                wait_for(lambda: state(pool, a.url) is not State.HEALTHY)
                if not aborts:
                    assert state(pool, a.url) is State.LEAVING and a.num_running
                    a.gate.set()

            leaving = threading.Thread(target=leave)
            leaving.start()
            with RolloutClient(pool, RequestLimits(retry_delay=0.0)) as client:
                groups = generate(client, prompts, n=2, sampling_params=SAMPLING, weight_version=1)
                leaving.join()
                wait_for(lambda: state(pool, a.url) is State.REMOVED)
                before = served_by(groups, a, b)
                generate(client, prompts, n=2, sampling_params=SAMPLING, weight_version=1)
            assert served_by(groups, a, b) == [before[0], before[1] + 12]
            assert push(pool, 2, (b,)) == [b.url]
            wait_for(lambda: a.url not in (folder / SERVERS_FILE).read_text())
            change_servers(folder, a.url, "add")
            wait_for(lambda: state(pool, a.url) is State.STALE)
            assert pool.receivers()[0].needs_all
    continued = [r for group in groups for r in group if list(r.token_ids[:2]) == [50, 51]]
    assert bool(continued) == aborts
    assert sum(before) == 12 + len(continued)
    assert [LEFT in line for line in lines if a.url in line][:2] == [False, True]


def test_min_servers_is_the_floor(run_dir: Callable[..., Path]) -> None:
    with FakeServer() as a, FakeServer() as b:
        folder = run_dir(a.url, b.url, min_servers=2)
        with pytest.raises(ValueError, match=r"1 servers would be left, but .*min_servers=2: add"):
            change_servers(folder, a.url, "remove")
        gone, lines = f"http://127.0.0.1:{ClaimedPort().number}", list[str]()
        change_servers(folder, gone, "add")
        policy = replace(POLICY, min_servers=2, start_timeout=0.2)
        with pool_of(folder, policy, lines) as pool:  # it starts without the added server
            push(pool, 1)
            wait_for(lambda: state(pool, gone) is State.AWAY)
            change_servers(folder, a.url, "remove")  # three are named, two of them are there
            wait_for(lambda: any("is to be removed" in line for line in lines))
            assert state(pool, a.url) is State.HEALTHY
            with FakeServer() as c:
                change_servers(folder, c.url, "add")
                wait_for(lambda: state(pool, a.url) is State.REMOVED)
                reason = r"1 rollout servers are left .* was removed by megavlm servers remove"
                with pytest.raises(RolloutServerError, match=reason):
                    for _ in range(3):
                        pool.failed(b.url, "lost")
    (told,) = [line for line in lines if "is to be removed" in line]
    assert told.endswith("it stays until 2 others are there (rollout.min_servers)")


def test_a_resumed_run_has_the_servers_that_were_asked_for(run_dir: Callable[..., Path]) -> None:
    with FakeServer() as a, FakeServer() as b:
        folder = run_dir(a.url, b.url)
        change_servers(folder, a.url, "remove")
        gone = f"http://127.0.0.1:{ClaimedPort().number}"
        change_servers(folder, gone, "add")
        with pool_of(folder) as pool:
            assert list(pool.handles) == [b.url, gone]
            assert push(pool, 1) == [b.url]
            change_servers(folder, a.url, "add")
            wait_for(lambda: a.url in pool.handles and state(pool, a.url) is State.STALE)
        with pool_of(folder) as pool:
            assert set(pool.handles) == {a.url, b.url, gone}


def test_a_producer_keeps_the_requests_of_a_server_that_leaves() -> None:
    with FakeServer() as a, FakeServer() as b:
        pool = ServerPool([ServerHandle(a.url), ServerHandle(b.url)], POLICY, lambda line: None)
        with pool:
            push(pool, 1)
            a.num_running = 1
            pool.remove(a.url)
            mirror = ServerProxy(lambda report: None)
            mirror.update(ServerStates.of(pool))
            assert [one.url for one in mirror.routable("1")] == [b.url]
            assert not mirror.lost(a.url, "1") and not pool.lost(a.url, "1")
            assert push(pool, 2) == [b.url]
            assert pool.lost(a.url, "1") and not pool.lost(a.url, None)
            a.num_running = 0
            wait_for(lambda: state(pool, a.url) is State.REMOVED)
            mirror.update(ServerStates.of(pool))
            assert mirror.lost(a.url, None) and pool.lost(a.url, None)


@pytest.mark.parametrize(
    ("keys", "url", "sentence"),
    [
        ({}, "http://a:1/", r"rollout\.urls=.* names a server twice"),
        ({}, "a:1", r"'a:1', but that is not a server's address"),
        (
            {"router": "http://r:1", "suppress_special_tokens": False},
            "http://b:1",
            r"rollout\.router=http://r:1 chooses them: start it with rollout\.router=null",
        ),
        ({"mode": "managed", "urls": []}, "http://b:1", "starts its own servers: start it with"),
    ],
)
def test_servers_that_cannot_be_added(
    run_dir: Callable[..., Path], keys: dict[str, Any], url: str, sentence: str
) -> None:
    folder = run_dir("http://a:1", **keys)
    with pytest.raises(ValueError, match=sentence):
        change_servers(folder, url, "add")
    with pytest.raises(ValueError):
        change_servers(folder, "http://c:1", "remove")
    assert not (folder / "servers").exists()


def test_the_list_has_states_and_what_is_to_be_done(
    run_dir: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer() as a, FakeServer() as b, pool_of(folder := run_dir(a.url, b.url)):
        wait_for((folder / SERVERS_FILE).exists)
        change_servers(folder, "http://c:1", "add")
        change_servers(folder, a.url, "remove")
        list_servers(folder)
        shown = capsys.readouterr().out
        assert "stale" in shown and shown.count(b.url) == 1 and "http://c:1" in shown
    list_servers(folder)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.endswith(f"has no running servers {b.url} http://c:1")


def test_a_server_catches_up_between_pushes_unless_it_is_too_late(
    run_dir: Callable[..., Path],
) -> None:
    """With a store. It is left out of pushes meanwhile; a failure is tried again."""
    asked: list[str] = []
    going_on, failures = threading.Event(), 1

    def catch_up(receiver: Receiver) -> str | None:
        nonlocal failures
        asked.append(receiver.url)
        going_on.wait(60)
        if failures:
            failures -= 1
            raise ServersFailed("the store was away")
        return "2" if asked.count(receiver.url) > 2 else "1"

    with FakeServer() as a, FakeServer() as b, pool_of(folder := run_dir(a.url)) as pool:
        pool.catch_up_by(catch_up)
        push(pool, 1, (a,))
        change_servers(folder, b.url, "add")
        wait_for(lambda: asked == [b.url])
        assert state(pool, b.url) is State.STALE
        assert push(pool, 2, (a,)) == [a.url], "it is left out"
        going_on.set()
        wait_for(lambda: state(pool, b.url) is State.HEALTHY)
        assert asked == [b.url] * 3, "it failed, had version 1 too late, and then had 2"
        assert {one.url for one in pool.routable("2")} == {a.url, b.url}
        assert push(pool, 3, (a, b)) == [a.url, b.url]
