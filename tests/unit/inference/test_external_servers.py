"""Servers that were started elsewhere: their requirements, and their start in a pool."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server import ClaimedPort
from megavlm.inference.server_pool import supervisor
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.requirements import Requirements
from megavlm.inference.server_pool.state import RestartPolicy, State
from tests.fakes.server import FakeServer
from tests.support.server_pools import POLICY, external, push, state, wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TICK", 0.02)


def test_external_servers_must_answer_in_time() -> None:
    policy = RestartPolicy(start_timeout=0.3)  # as a run has it
    pool = ServerPool([ServerHandle("http://127.0.0.1:9")], policy)
    reason = (
        r"127\.0\.0\.1:9 did not answer within 0\.3 s \(rollout\.start_timeout\): /health: Conn"
    )
    with pytest.raises(RolloutServerError, match=reason):
        pool.__enter__()


ROUTES = Requirements(routed_experts=True)
KEPT = Requirements(kept_tokens=50)
FRESH = Requirements(fresh_images=True)
ONE_MACHINE = Requirements(sync="tensor")
EXPERTS = Requirements(expert_adapters=True)
ENVIRONMENT = "internal_states"


@pytest.mark.parametrize(
    ("info", "required", "reason"),
    [
        ({"version": "0.5.4"}, Requirements(), r"runs SGLang 0\.5\.4, but 0\.5\.21 to 0\.5\.23"),
        ({"version": None}, Requirements(), "runs SGLang None"),
        (
            {"version": "0.5.22", "speculative_algorithm": "EAGLE"},
            Requirements(),
            r"runs SGLang 0\.5\.22 with speculative decoding, but needs 0\.5\.23",
        ),
        ({"version": "0.5.22", "speculative_algorithm": None}, Requirements(), None),
        ({"version": "0.5.23", "speculative_algorithm": "EAGLE"}, Requirements(), None),
        ({"tp_size": "x"}, Requirements(), "does not report its tp_size"),
        ({}, FRESH, "start it with SGLANG_VLM_CACHE_SIZE_MB=0"),
        ({ENVIRONMENT: [{"env_vars": {"SGLANG_VLM_CACHE_SIZE_MB": "100"}}]}, FRESH, "start it"),
        ({ENVIRONMENT: [{"env_vars": {"SGLANG_VLM_CACHE_SIZE_MB": "0"}}]}, FRESH, None),
        ({}, ROUTES, "start it with --enable-return-routed-experts, or set routing_replay=false"),
        ({"enable_return_routed_experts": True}, ROUTES, None),
        ({}, KEPT, "returns at most 0 tokens that top-p and top-k keep"),
        (
            {"sampling_mask_max_tokens": 49},
            KEPT,
            "with --sampling-mask-max-tokens 50, or",
        ),
        ({"sampling_mask_max_tokens": 50}, KEPT, None),
        (
            {"sampling_mask_max_tokens": 50, "speculative_algorithm": "EAGLE", "version": "0.5.23"},
            KEPT,
            "start it without --speculative-algorithm, or set rollout.top_p=1",
        ),
        ({}, EXPERTS, "start it with python -m megavlm.slurm.servers, or set rollout.lora=merged"),
        ({"custom_weight_loader": ["megavlm_weights.receive"]}, EXPERTS, None),
        ({"version": "0.6.0rc1"}, Requirements(), None),
        ({"max_total_num_tokens": 3000}, Requirements(), None),
        (
            {"load_format": "dummy"},
            Requirements(),
            "was started without weights, as servers of rol",
        ),
        ({"load_format": "dummy"}, ONE_MACHINE, None),
        ({"nnodes": 2, "device": "cuda"}, ONE_MACHINE, r"on 2 nodes, but rollout\.sync=tensor"),
        ({"nnodes": 2, "device": "cuda"}, Requirements(), None),
        ({"nnodes": 2, "device": "cpu"}, ONE_MACHINE, None),
    ],
)
def test_an_external_server_must_be_as_the_run_needs_it(
    info: dict[str, Any], required: Requirements, reason: str | None
) -> None:
    with FakeServer() as fake:
        fake.info = info
        pool = ServerPool([ServerHandle(fake.url, required=required)], policy=POLICY)
        if reason is None:
            with pool:
                assert pool.receivers()
                address = pool.handles[fake.url].address
                assert address.cache_tokens == info.get("max_total_num_tokens")
        else:
            with pytest.raises(RolloutServerError, match=f"{fake.url} .*{reason}"):
                pool.__enter__()


@pytest.mark.parametrize("fault", ["garbage", "list"])
def test_an_answer_in_another_form_is_no_sign_of_life(fault: Any) -> None:
    with FakeServer() as fake:
        fake.faults = {("/server_info", 1): fault, ("/model_info", 1): "wrong form"}
        with external(fake, policy=replace(POLICY, health_check_timeout=60.0)) as pool:
            push(pool, 1)
            pool.resting = True  # so that the version is asked for
            pool.request_failed(fake.url, "timed out")
            wait_for(lambda: state(pool, fake.url) is State.HEALTHY)
            assert fake.paths().count("/model_info") == 2


def test_a_wrong_key_is_reported_at_once() -> None:
    with FakeServer(keys=("reads", "writes")) as fake:
        pool = ServerPool([ServerHandle(fake.url, "other")], policy=POLICY)
        with pytest.raises(RolloutServerError, match=r"refused our key .* MEGAVLM_ROLLOUT_API_KEY"):
            pool.__enter__()


def test_a_server_that_a_dead_trainer_left_paused_resumes() -> None:
    """Its health probe, which takes a token, fails while it is paused; during a run, too."""
    with FakeServer(keys=("reads", "writes")) as fake:
        fake.is_paused = True
        handle = ServerHandle(fake.url, "reads", "writes")
        with ServerPool([handle], policy=POLICY) as pool:
            assert state(pool, fake.url) is State.STALE
            fake.is_paused = True
            pool.request_failed(fake.url, "timed out")
            pool.failed(fake.url, "the request to continue was lost")
            wait_for(lambda: state(pool, fake.url) is State.DEAD)
            wait_for(lambda: state(pool, fake.url) is State.STALE)
    assert fake.bodies("/continue_generation")[0] == {"torch_empty_cache": False}


def test_servers_that_no_push_goes_to_are_changed_in_nothing() -> None:
    """Another run may be pushing to it."""
    with FakeServer() as fake:
        with external(fake, policy=replace(POLICY, needs_refit=False)) as pool:
            assert state(pool, fake.url) is State.HEALTHY
    assert fake.paths() == ["/health", "/server_info"]


def test_a_wrong_admin_key_does_not_hide_that_a_server_answers() -> None:
    with FakeServer(keys=("reads", "writes")) as fake:
        with ServerPool([ServerHandle(fake.url, "reads", "other")], policy=POLICY) as pool:
            assert state(pool, fake.url) is State.STALE


def test_a_server_that_comes_back_after_its_time_is_taken_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run goes on with the other one meanwhile; it gets the weights before it serves."""
    monkeypatch.setattr(supervisor, "LOOK_EVERY", 0.05)
    policy, lines = replace(POLICY, start_timeout=1.0), list[str]()
    port = ClaimedPort()
    gone = FakeServer(port=port.number)
    with FakeServer() as left, ExitStack() as stack:
        stack.enter_context(gone)
        with external(left, gone, policy=policy, log=lines.append) as pool:
            push(pool, 1, (left, gone))
            stack.close()
            pool.request_failed(gone.url, "reset")
            wait_for(lambda: state(pool, gone.url) is State.AWAY)
            assert push(pool, 2, (left,)) == [left.url]
            assert [one.url for one in pool.routable("2")] == [left.url]
            with FakeServer(port=port.number) as back:
                wait_for(lambda: state(pool, gone.url) is State.STALE)
                assert [one.url for one in pool.routable("2")] == [left.url]
                push(pool, 3, (left, back))
                assert {one.url for one in pool.routable("3")} == {left.url, back.url}
                assert not any(one.is_local for one in pool.routable("3")), "it has other files"
                assert back.weight_version == "3"
    (told,) = [line for line in lines if "is away for" in line]
    assert "rollout.start_timeout" in told and "looked for as long as the run lives" in told


def test_a_run_with_too_few_servers_does_not_wait_for_those_that_are_away() -> None:
    port = ClaimedPort()
    with FakeServer(port=port.number) as gone:
        url = gone.url
        pool = external(gone, policy=replace(POLICY, start_timeout=1.0))
        pool.__enter__()
    try:
        pool.refitted(url, "1")
        pool.request_failed(url, "reset")
        wait_for(lambda: state(pool, url) is State.AWAY)
        with pytest.raises(RolloutServerError, match=r"0 rollout servers are left .* was away for"):
            pool.receivers()
    finally:
        pool.__exit__(None, None, None)
