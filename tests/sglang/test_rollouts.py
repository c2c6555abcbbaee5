"""Aborted and continued requests at the real server, and the release of its memory."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megavlm.config.rollout import Rollout
from megavlm.data.processor import Processor
from megavlm.families import family_of
from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import ABORT, Response, SamplingParams, VersionSpan
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.memory import TAGS, ServerMemory
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import RestartPolicy, State
from tests.conftest import DATA
from tests.fakes.fixed_servers import FixedServers
from tests.sglang.conftest import PLAIN, Served, model_folder
from tests.sglang.questions import prompts
from tests.support.forked_servers import forked
from tests.support.generation import generate, generate_some
from tests.support.timeouts import scaled

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]


def greedy(served: Served) -> SamplingParams:
    suppressed = (*served.processor.suppressed_ids, served.processor.eos_id)
    return SamplingParams(0.0, 96, suppressed_ids=suppressed, stop_ids=served.processor.stop_ids)


def token_ids(responses: Sequence[Response]) -> list[list[int]]:
    return [response.token_ids.tolist() for response in responses]


def cut(response: Response, length: int) -> Response:
    return replace(
        response,
        token_ids=response.token_ids[:length],
        logprobs=response.logprobs[:length],
        finish=ABORT,
        spans=(VersionSpan(response.weight_version, 0, length),),
    )


def test_continued_responses_equal_uninterrupted_ones(served: Served) -> None:
    """Images too, which the server gets as paths first and then as their content. The first group
    lacks half its tokens; when it has them the others are aborted, which have some of theirs then.
    Not on a machine that stops one of them for long: then again.
    """
    server, how = served.server, greedy(served)
    asked = list(prompts(served.processor).values())
    routing = FixedServers(server.url, api_key=server.api_key, admin_key=server.admin_key)
    with served.client as local:
        whole = generate(local, asked, n=2, sampling_params=how)
    with RolloutClient(routing, RequestLimits(total=scaled(120))) as client:
        begun = [[cut(response, 48) for response in whole[0]], [], [], []]
        for _ in range(10):
            partly = generate_some(client, asked, 1, n=2, sampling_params=how, begun=begun)
            assert token_ids(partly[0]) == token_ids(whole[0])
            lengths = [len(r.token_ids) for group in partly[1:] for r in group]
            if any(0 < length < 96 for length in lengths):
                break
        else:
            pytest.fail(f"none was aborted in the middle: {lengths}")
        finished = generate(client, asked, n=2, sampling_params=how, begun=partly)
    for group, expected in zip(finished, whole, strict=True):
        for response, other in zip(group, expected, strict=True):
            assert response.finish == "length"
            assert response.token_ids.tolist() == other.token_ids.tolist()
            assert response.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert response.spans == (VersionSpan("start", 0, 96),)


def test_memory_released_and_taken_back(served: Served) -> None:
    """On a CPU nothing is released, but the order and the tags are the scheduler's to refuse."""
    server, how = served.server, greedy(served)
    handle = ServerHandle(server.url, server.api_key, server.admin_key)
    asked = list(prompts(served.processor).values())
    with ServerPool([handle], policy=RestartPolicy(needs_refit=False)) as pool:
        with RolloutClient(pool) as client:
            before = generate(client, asked, n=1, sampling_params=how)
            with ServerMemory(pool, Rollout(request_timeout=scaled(180))) as memory:
                for _ in range(2):
                    memory.release(TAGS)
                    memory.resume(["weights"], starts=False)
                    memory.resume(TAGS, starts=True)
            assert pool.record(server.url).state is State.HEALTHY
            after = generate(client, asked, n=1, sampling_params=how)
    assert [token_ids(group) for group in before] == [token_ids(group) for group in after]


@pytest.mark.slow
def test_the_server_stops_where_the_trainer_knows_that_it_does(tmp_path: Path) -> None:
    """Each special token in turn is the only one that can be sampled. The tokenizer's end is not
    the turn's, and generation_config.json has a list.
    """
    folder = shutil.copytree(model_folder(PLAIN), tmp_path / "model")
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids
    text, start, turn = ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    for name, values in (
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
        ("generation_config.json", {"eos_token_id": [turn, text]}),
    ):
        known = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(known | values))
    processor = Processor(folder, DATA, family_of(folder))
    options = ServerOptions(folder, dtype="float32", device="cpu")
    with forked(ManagedServer(options, log_path=tmp_path / "log")) as server:
        routing = FixedServers(server.url, api_key=server.api_key, admin_key=server.admin_key)
        asked = [prompts(processor)["text"]]
        with RolloutClient(routing) as client:
            for token in (text, start, turn):
                others = tuple(i for i in range(processor.vocab_size) if i != token)
                how = SamplingParams(0.0, 3, suppressed_ids=others, stop_ids=processor.stop_ids)
                ((response,),) = generate(client, asked, n=1, sampling_params=how)
                stops = token in processor.stop_ids
                assert response.token_ids.tolist() == [token] * (1 if stops else 3)
                assert response.finish == ("stop" if stops else "length")
    assert set(processor.stop_ids) == {turn, text} and processor.eos_id == turn
