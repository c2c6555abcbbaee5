"""The client's retry rules, order, and refusals, against a server that fails on demand."""

from typing import Any

import pytest

from megavlm.rollout.client import ATTEMPTS, PROMPTS_PER_REQUEST, RolloutClient
from megavlm.rollout.errors import RolloutRequestError, RolloutServerError
from megavlm.rollout.messages import Sampling
from megavlm.rollout.server import free_port
from tests.fakes.server import FakeServer, Fault
from tests.unit.rollout.prompts import make_prompt

GREEDY = Sampling(temperature=0.0, max_new_tokens=4)


def client(*servers: FakeServer | str, **options: Any) -> RolloutClient:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return RolloutClient(urls, api_key="secret", **({"retry_delay": 0.0} | options))


def test_order_over_requests_and_samples() -> None:
    """Five requests over two servers: each prompt has its own responses, in order."""
    prompts = [make_prompt(first_id=100 + i) for i in range(4 * PROMPTS_PER_REQUEST + 3)]
    with FakeServer() as a, FakeServer() as b:
        groups = client(a, b).generate(prompts, n=3, sampling=GREEDY)
        assert len(a.requests) == 3 and len(b.requests) == 2
    assert [[r.token_ids for r in group] for group in groups] == [
        [(100 + i, 0), (100 + i, 1), (100 + i, 2)] for i in range(len(prompts))
    ]
    assert groups[0][0].logprobs == (-0.5, -1.5)
    assert groups[0][0].finish == "stop" and groups[0][0].weight_version == "1"


def test_one_prompt_and_none() -> None:
    with FakeServer() as fake:
        ((response,),) = client(fake).generate([make_prompt()], n=1, sampling=GREEDY)
        assert response.token_ids == (7, 0)
        assert client(fake).generate([], n=1, sampling=GREEDY) == []


@pytest.mark.parametrize("fault", ["500", "reset", "garbage", "wrong form", "hang", "slow body"])
def test_fault_is_retried(fault: Fault) -> None:
    with FakeServer(fault, fault) as fake:
        ((response,),) = client(fake, timeout=0.3).generate([make_prompt()], n=1, sampling=GREEDY)
        assert response.token_ids == (7, 0)
        assert len(fake.requests) == 3


@pytest.mark.parametrize("fault", ["500", "garbage", "hang"])
def test_retries_are_bounded(fault: Fault) -> None:
    with FakeServer(*[fault] * 20) as fake:
        with pytest.raises(RolloutServerError, match=rf"rows.parquet:7 in {ATTEMPTS} attempts"):
            client(fake, timeout=0.2).generate([make_prompt()], n=1, sampling=GREEDY)
        assert len(fake.requests) == ATTEMPTS


def test_refusal_is_not_retried() -> None:
    with FakeServer("400") as fake:
        with pytest.raises(RolloutRequestError, match=r"rows.parquet:7 \(400\).*as told"):
            client(fake).generate([make_prompt()], n=1, sampling=GREEDY)
        assert len(fake.requests) == 1


def test_dead_server_gives_its_requests_to_the_other() -> None:
    prompts = [make_prompt(first_id=i) for i in range(40)]
    with FakeServer() as alive:
        dead = f"http://127.0.0.1:{free_port()}"
        groups = client(dead, alive).generate(prompts, n=2, sampling=GREEDY)
    assert [group[0].token_ids[0] for group in groups] == list(range(40))


def test_nobody_listens() -> None:
    with pytest.raises(RolloutServerError, match="ConnectError"):
        client(f"http://127.0.0.1:{free_port()}").generate([make_prompt()], n=1, sampling=GREEDY)


def test_other_prompt_length_stops() -> None:
    with FakeServer(prompt_tokens=4) as fake:
        with pytest.raises(RuntimeError, match=r"rows.parquet:7: .* counts 4 .* the trainer 3"):
            client(fake).generate([make_prompt()], n=1, sampling=GREEDY)
        assert len(fake.requests) == 1


def test_other_weight_version_stops() -> None:
    with FakeServer(weight_version="4") as fake:
        client(fake).generate([make_prompt()], n=1, sampling=GREEDY, weight_version=4)
        with pytest.raises(RolloutServerError, match=r"\['4'\] instead of 5"):
            client(fake).generate([make_prompt()], n=1, sampling=GREEDY, weight_version=5)


def test_body() -> None:
    sampling = Sampling(temperature=0.7, max_new_tokens=9, top_p=0.9, suppressed_ids=(3, 5))
    prompts = [make_prompt(pngs=(b"a", b"b")), make_prompt(first_id=8)]
    with FakeServer() as fake:
        client(fake).generate(prompts, n=2, sampling=sampling)
        ((path, body, authorization),) = fake.requests
    assert path == "/generate" and authorization == "Bearer secret"
    assert body == {
        "input_ids": [[7, 1, 2], [8, 1, 2]],
        "image_data": [["data:image/png;base64,YQ==", "data:image/png;base64,Yg=="], []],
        "sampling_params": {
            "n": 2,
            "temperature": 0.7,
            "top_p": 0.9,
            "max_new_tokens": 9,
            "logit_bias": {"3": -1e9, "5": -1e9},
        },
        "return_logprob": True,
    }


def test_no_servers() -> None:
    with pytest.raises(ValueError, match=r"rollout\.urls is empty"):
        client()
