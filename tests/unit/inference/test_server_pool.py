"""Faults of servers in a pool: stubs that run as processes of their own, and fakes."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megavlm.inference import server
from megavlm.inference.client import RolloutClient
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool import status, supervisor
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import State
from megavlm.rollout.ahead.mirror import ServerStates
from tests.fakes.server import FakeServer
from tests.support.generation import generate
from tests.support.prompts import make_prompt
from tests.support.server_pools import POLICY, external, push, state, wait_for
from tests.support.timeouts import scaled

STUB = Path(__file__).resolve().parents[2] / "fakes" / "stub_sglang"
NO_DELAY = RequestLimits(retry_delay=0.0)
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=4)
QUEUE = {"num_running_reqs": 2, "num_waiting_reqs": 3}  # of each of a server's schedulers


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    monkeypatch.setenv("STUB", "ok")
    monkeypatch.setattr(supervisor, "TICK", 0.02)


@pytest.fixture
def lines() -> list[str]:
    return []


def managed(
    tmp_path: Path, count: int, lines: list[str], port: int | None = None, **options: Any
) -> ServerPool:
    servers = [
        ManagedServer(
            ServerOptions("m", dtype="float32", device="cpu"),
            port=port,
            log_path=tmp_path / f"{index}.log",
        )
        for index in range(count)
    ]
    handles = [ServerHandle.managed(server) for server in servers]
    return ServerPool(handles, **({"policy": POLICY, "log": lines.append} | options))


def kill(pool: ServerPool, url: str) -> None:
    server = pool.handles[url].server
    assert server is not None and server._process is not None
    os.kill(server._process.pid, signal.SIGKILL)


def test_servers_start_together_and_nothing_is_left(tmp_path: Path, lines: list[str]) -> None:
    before = set(psutil.Process().children(recursive=True))
    with managed(tmp_path, 2, lines, waits=False) as pool:  # until the trainer has loaded its model
        one, other = pool.handles
        assert [state(pool, url) for url in pool.handles] == [State.STARTING] * 2
        assert pool.is_starting
        pool.wait_for_starts()
        assert not pool.is_starting
        assert [state(pool, url) for url in pool.handles] == [State.STALE] * 2
        assert pool.routable("0") == [] and pool.lacks_weights()
        assert [receiver.needs_all for receiver in pool.receivers()] == [True, True]
        assert sorted(push(pool, 0)) == sorted([one, other])
        assert [address.url for address in pool.routable("0")] == [one, other]
        for address in (*pool.routable("0"), *ServerStates.of(pool).addresses.values()):
            assert address.is_local, "it may be sent paths"
        assert [receiver.needs_all for receiver in pool.receivers()] == [False, False]
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) == 6  # each the server, its reaper, its worker
    _, alive = psutil.wait_procs(started, timeout=scaled(180))
    assert not alive and lines == []


def test_keys_are_in_no_representation() -> None:
    keys = ("r3ads", "wr1tes")
    with FakeServer(keys=keys) as fake:
        with ServerPool([ServerHandle(fake.url, *keys)], policy=POLICY) as pool:
            push(pool, 0)
            shown = repr([pool.receivers(), pool.routable("0"), *pool.handles.values()])
            assert shown.count(fake.url) == 3 and not any(key in shown for key in keys)


def test_a_server_that_does_not_start_in_time_ends_the_run(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB", "silent")
    with pytest.raises(RolloutServerError, match=r"rollout\.start_timeout"):
        managed(tmp_path, 2, lines, policy=replace(POLICY, start_timeout=1.0)).__enter__()
    assert not [p for p in psutil.Process().children() if str(tmp_path) in " ".join(p.cmdline())]


def test_a_server_that_does_not_start_meanwhile_is_not_started_again(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB", "crash")
    with managed(tmp_path, 1, lines, waits=False) as pool:
        (url,) = pool.handles
        wait_for(lambda: state(pool, url) is State.DEAD)
        wait_for(lambda: time.monotonic() > pool.record(url).retry_at + 10 * supervisor.TICK)
        assert state(pool, url) is State.DEAD
        with pytest.raises(RolloutServerError, match="no such model"):
            pool.wait_for_starts()
    assert lines == []


def test_a_server_whose_port_another_program_takes_before_it_listens(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of that program, to which our key is wrong, are not taken for the server's."""
    with FakeServer(keys=("theirs", "theirs")) as another:
        pool = managed(tmp_path, 1, lines, port=int(another.url.rpartition(":")[2]))
        monkeypatch.setattr(server, "require_free", lambda port: None)  # it was free at the launch
        with pytest.raises(RolloutServerError, match=r"exit code 1(.|\n)*in use"):
            pool.__enter__()


def test_exhausted_restarts_report_the_log(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB", "mortal")
    monkeypatch.setenv("STUB_LAUNCHES", str(tmp_path / "launches"))
    with managed(tmp_path, 1, lines, policy=replace(POLICY, max_restarts=1)) as pool:
        (url,) = pool.handles
        push(pool, 1)
        kill(pool, url)
        wait_for(lambda: state(pool, url) is State.RETIRED)
        expected = r"0 rollout servers are left and rollout.min_servers=1.*(\n.*)*no such model"
        for ask in (lambda: pool.routable("1"), pool.receivers, pool.lacks_weights):
            with pytest.raises(RolloutServerError, match=expected):
                ask()
        launches = (tmp_path / "launches").read_text().split()
        assert launches == [url.rpartition(":")[2]] * 2


def test_a_server_killed_in_mid_batch_loses_and_doubles_nothing() -> None:
    """The other server gets its requests in flight; no answered request is sent again."""
    prompts = [make_prompt(first_id=i) for i in range(12)]
    with FakeServer() as a, FakeServer() as b:
        with external(a, b) as pool, RolloutClient(pool, NO_DELAY) as client:
            push(pool, 1)
            a.held = set(range(12))  # it answers nothing until it dies

            def die() -> None:
                wait_for(lambda: "/generate" in a.paths())
                a.ill.set()
                a.__exit__()

            death = threading.Thread(target=die)
            death.start()
            groups = generate(client, prompts, n=2, sampling_params=SAMPLING, weight_version=1)
            death.join()
            assert [[tuple(r.token_ids) for r in group] for group in groups] == [
                [(i, 0), (i, 1)] for i in range(12)
            ]
            asked = [ids[0] for body in b.bodies("/generate") for ids in body["input_ids"]]
            assert sorted(asked) == list(range(12)), "each once"
        b.held.clear()


def test_a_killed_server_starts_again_and_the_batch_continues_after_a_refit(
    tmp_path: Path, lines: list[str]
) -> None:
    """Finished groups stay; the refit is asked for once the server is back. Until then it gets
    nothing.
    """
    prompts = [make_prompt(first_id=i) for i in range(3)]
    refits = []
    with (
        managed(tmp_path, 1, lines) as pool,
        RolloutClient(pool, NO_DELAY) as client,
    ):
        (url,) = pool.handles
        push(pool, 0)
        kill(pool, url)

        def refit() -> None:
            assert state(pool, url) is State.STALE
            assert pool.routable("0") == [] == pool.routable(None)
            assert [receiver.needs_all for receiver in pool.receivers()] == [True]
            refits.append(push(pool, 0))

        begun = generate(client, prompts[:1], n=2, sampling_params=SAMPLING, refit=refit)
        groups = generate(
            client, prompts, n=2, sampling_params=SAMPLING, refit=refit, begun=[begun[0], [], []]
        )
        assert len(refits) == 1 and groups[0] is not begun[0] and groups[0] == begun[0]
        assert [address.url for address in pool.routable("0")] == [url]
    assert "died" in lines[0] and "exit code -9" in lines[0] and "waits for weights" in lines[1]
    assert [[tuple(r.token_ids) for r in group] for group in groups] == [
        [(i, 0), (i, 1)] for i in range(3)
    ]


def test_another_weight_version_makes_the_server_stale_and_is_asked_elsewhere() -> None:
    prompts = [make_prompt(first_id=i) for i in range(40)]
    with FakeServer() as a, FakeServer() as b:
        with external(a, b) as pool, RolloutClient(pool, NO_DELAY) as client:
            push(pool, 5, (a, b))
            a.weight_version = "default"  # another process restarted it
            groups = generate(client, prompts, n=1, sampling_params=SAMPLING, weight_version=5)
            assert {r.weight_version for group in groups for r in group} == {"5"}
            assert state(pool, a.url) is State.STALE
            assert {t.url: t.needs_all for t in pool.receivers()} == {
                a.url: True,
                b.url: False,
            }


def test_a_server_that_will_not_hold_the_weights_ends_the_rollout() -> None:
    with FakeServer(weight_version="9") as fake:
        with external(fake) as pool, RolloutClient(pool, NO_DELAY) as client:
            push(pool, 5)
            with pytest.raises(RolloutServerError, match=r"versions \['9'\] instead of 5"):
                generate(
                    client,
                    [make_prompt()],
                    n=1,
                    sampling_params=SAMPLING,
                    weight_version=5,
                    refit=lambda: push(pool, 5),
                )


def test_a_failed_request_waits_for_a_real_answer() -> None:
    """After a 5xx the server is suspect until /health_generate succeeds; then a retry."""
    with FakeServer("500", only_generate=True) as fake:
        with external(fake) as pool, RolloutClient(pool, NO_DELAY) as client:
            push(pool, 1)
            generate(client, [make_prompt()], n=1, sampling_params=SAMPLING, weight_version=1)
            assert fake.paths().count("/health_generate") == 1
            assert fake.paths().count("/generate") == 2


def test_a_server_that_hangs_is_noticed_by_probes_and_its_requests_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "PROBE_EVERY", 0.1)
    with FakeServer() as a, FakeServer() as b:
        with external(a, b) as pool, RolloutClient(pool, NO_DELAY) as client:
            push(pool, 1)
            a.held = set(range(8))
            a.ill.set()
            prompts = [make_prompt(first_id=i) for i in range(8)]
            groups = generate(client, prompts, n=1, sampling_params=SAMPLING, weight_version=1)
            assert len(groups) == 8 and all(groups)
            wait_for(lambda: state(pool, a.url) is State.DEAD)
            a.aborted.set()


def test_no_probe_while_weights_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PROBE_EVERY", 0.02)
    check, checks = supervisor.Supervisor._check, list[ServerHandle]()

    async def counted(self: supervisor.Supervisor, handle: ServerHandle) -> None:
        checks.append(handle)
        await check(self, handle)

    def wait_for_checks(count: int) -> None:
        last = len(checks) + count
        wait_for(lambda: len(checks) >= last)

    monkeypatch.setattr(supervisor.Supervisor, "_check", counted)
    with FakeServer() as fake, external(fake) as pool:
        push(pool, 1)
        wait_for(lambda: fake.paths().count("/model_info") > 2)
        (receiver,) = pool.receivers()
        wait_for_checks(2)  # a probe that was under way is answered
        before = len(fake.requests)
        wait_for_checks(4)
        assert len(fake.requests) == before
        pool.refitted(receiver.url, "1")
        wait_for(lambda: len(fake.requests) > before)


def test_an_idle_server_that_was_replaced_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PROBE_EVERY", 0.02)
    with FakeServer() as fake, external(fake) as pool:
        push(pool, 1, (fake,))
        fake.weight_version = "default"
        wait_for(lambda: state(pool, fake.url) is State.STALE)
        assert pool.routable("1") == []


def test_a_push_that_fails_at_one_server_leaves_it_stale() -> None:
    with FakeServer() as a, FakeServer() as b, external(a, b) as pool:
        push(pool, 1)
        pool.receivers()
        pool.failed(a.url, "refused")
        pool.refitted(b.url, "2")
        assert [address.url for address in pool.routable("2")] == [b.url]
        wait_for(lambda: state(pool, a.url) is State.STALE)
        assert {t.url: t.needs_all for t in pool.receivers()} == {a.url: True, b.url: False}


def test_a_server_left_out_of_a_push_made_again_is_probed() -> None:
    with FakeServer() as a, FakeServer() as b, external(a, b) as pool:
        push(pool, 1)
        pool.receivers()
        pool.failed(a.url, "refused")
        assert [receiver.url for receiver in pool.receivers(without={a.url})] == [b.url]
        assert pool.may_probe(a.url) and not pool.may_probe(b.url)


def test_a_suspect_that_missed_a_push_is_stale_when_it_comes_back() -> None:
    with FakeServer() as a, FakeServer() as b, external(a, b) as pool:
        push(pool, 1)
        a.ill.set()
        pool.request_failed(a.url, "timed out")
        assert state(pool, a.url) is State.SUSPECT
        assert push(pool, 2) == [b.url]
        a.ill.clear()
        wait_for(lambda: state(pool, a.url) is State.STALE)


def test_the_states_of_servers_are_written_while_the_pool_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "WRITE_EVERY", 0.05)
    path = tmp_path / "servers.json"

    def servers() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(path.read_bytes())["servers"]
        return rows

    with FakeServer() as first, FakeServer() as second:
        with external(first, second, states_file=path) as pool:
            wait_for(lambda: path.exists() and servers()[1]["state"] == "stale")
            push(pool, 4, (first, second))
            pool.wrong_version(second.url, "it restarted")
            first.answer = lambda path, body: {"loads": [QUEUE, QUEUE]}  # type: ignore[method-assign]
            with pool.in_use(lambda: None):
                wait_for(lambda: servers()[0]["queue"] == [4, 6])
            row, other = servers()
            assert (row["url"], row["state"], row["version"]) == (first.url, "healthy", "4")
            assert other["state"] == "stale" and "it restarted" in other["reason"]
            assert other["queue"] is None
            text = path.with_name("servers.prom")
            wait_for(lambda: 'kind="waiting"' in text.read_text())
            samples = {
                (sample.name, *sorted(sample.labels.values())): sample.value
                for family in text_string_to_metric_families(text.read_text())
                for sample in family.samples
            }

            def value(name: str, *labels: str) -> float | None:
                return samples.get((f"megavlm_server_{name}", *sorted([tmp_path.name, *labels])))

            for url, name in ((first.url, "healthy"), (second.url, "stale")):
                assert value("state", url, name) == 1 and value("restarts_total", url) == 0
                assert value("state_seconds", url) is not None
            kinds = "running", "waiting"
            assert [value("requests", first.url, kind) for kind in kinds] == [4, 6]
            assert [value("requests", second.url, kind) for kind in kinds] == [None, None]
        assert not path.exists() and not text.exists()
