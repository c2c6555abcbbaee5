"""Routed experts of a real server, replayed by the trainer's routers."""

import base64
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from megavlm.data.packs.packing import make_pack
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.families import FAMILIES, family_of
from megavlm.inference.answers import parse_generate
from megavlm.inference.generation import GenerateFn
from megavlm.inference.protocol import Response, SamplingParams, VersionSpan, bearer
from megavlm.inference.routed_experts import routed_experts_shape
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool.requirements import Requirements
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.rollout.group_tree import group_tree
from megavlm.rollout.trajectory import Episode, Group
from megavlm.training.forward_backward import compute_logprobs
from tests.conftest import DATA
from tests.parity.eagle3_reference import add_random_eagle3
from tests.parity.runs import Run
from tests.parity.table import Ranks
from tests.sglang.conftest import Served, model_folder
from tests.sglang.questions import prompts
from tests.support.calls import episode
from tests.support.columns import columns
from tests.support.draft_head import add_draft_head, drafting
from tests.support.families import vision_tokens
from tests.support.fork import launch
from tests.support.forked_servers import forked
from tests.support.generation import generate
from tests.support.timeouts import scaled

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.xdist_group("routing replay")]
TIE = 1e-6


def with_ties(source: Path, target: Path, seed: int) -> Path:
    """Copy a model folder with routers whose logits are equal but for rounding, which decides."""
    target.mkdir()
    for file in filter(Path.is_file, source.iterdir()):
        (target / file.name).write_bytes(file.read_bytes())
    path = target / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(seed)
    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert routers
    for name in routers:
        tensors[name] = TIE * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, path, {"format": "pt"})
    return target


@pytest.fixture(
    scope="module", params=["qwen3_vl_moe, with drafts", "qwen3_5_moe", "qwen3_5_moe, with drafts"]
)
def routed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("routed")
    family, _, drafts = request.param.partition(", ")
    source, args = model_folder(family), dict[str, Any](enable_return_routed_experts=True)
    if drafts:
        is_eagle3 = FAMILIES[family].draft_head == "eagle3"
        source = (add_random_eagle3 if is_eagle3 else add_draft_head)(source, root / "drafting")
        args |= drafting(source)
    folder = with_ties(source, root / "served", seed=1)
    options = ServerOptions(folder, "float32", "cpu", server_args=args)
    with forked(ManagedServer(options, log_path=root / "server.log")) as server:
        yield Served(folder, Processor(folder, DATA, family_of(folder)), server)


def make_sampling_params(served: Served) -> SamplingParams:
    """Responses do not end before they have all of their tokens."""
    suppressed = (*served.processor.suppressed_ids, served.processor.eos_id)
    shape = routed_experts_shape(served.folder)
    assert shape is not None
    return SamplingParams(1.0, 12, suppressed_ids=suppressed, routed_experts=shape)


def test_logprobs_with_replay_are_the_servers(routed: Served, tmp_path: Path) -> None:
    """The trainer's routers differ by less than rounding in bf16, and choose other experts."""
    asked = list(prompts(routed.processor).values())
    answers = generate(routed.client, asked, n=3, sampling_params=make_sampling_params(routed))
    groups = [
        Group(prompt, episodes=[episode((prompt, response)) for response in responses])
        for prompt, responses in zip(asked, answers, strict=True)
    ]
    assert_replay_matters(routed, groups, tmp_path)
    for prompt, responses in zip(asked, answers, strict=True):
        for number, response in enumerate(responses):
            assert response.routed_experts is not None and response.routed_experts.dtype == np.uint8
            known = len(response.routed_experts) - len(response.token_ids) + 1
            assert known == (1 if number else len(prompt.token_ids)), "a prompt's are kept once"


def test_turns_and_continued_responses_have_the_routes_of_each_request(
    routed: Served, tmp_path: Path
) -> None:
    """Of a next turn only what the turn before lacks is asked for, from that turn's last token
    on.
    """
    how, (prompt, *_) = make_sampling_params(routed), list(prompts(routed.processor).values())[1:]
    ((first,),) = generate(routed.client, [prompt], n=1, sampling_params=how)
    begun = cut(first, 4)
    ((continued,),) = generate(routed.client, [prompt], n=1, sampling_params=how, begun=[[begun]])
    assert continued.token_ids.tolist()[:4] == first.token_ids.tolist()[:4]
    assert continued.routed_experts is not None and first.routed_experts is not None
    assert np.array_equal(
        continued.routed_experts[: len(begun.routed_experts)], begun.routed_experts
    )  # type: ignore[arg-type]
    row = Row(9, "Look again.", "", (), "", "test:9")
    said = [*continued.token_ids.tolist()[:-1], routed.processor.eos_id]
    continued = replace(continued, token_ids=np.array(said, np.int32))
    following = routed.processor.next_turn(prompt, said, row)
    known = continued.first_unrouted(len(prompt.token_ids))

    async def on_complete(index: int, responses: Sequence[Response], ask: GenerateFn) -> None:
        last = await ask(following, first_routed=known)
        assert last.routed_experts is not None
        assert (
            len(last.routed_experts) == len(following.token_ids) + len(last.token_ids) - 1 - known
        )
        played.append(episode((prompt, continued), (following, last)))

    played: list[Episode] = []
    generate(
        routed.client,
        [prompt],
        n=1,
        sampling_params=how,
        begun=[[continued]],
        on_complete=on_complete,
    )
    # The end of the first turn was not sampled.
    assert_replay_matters(routed, [Group(prompt, episodes=played)], tmp_path, len(said) - 1)


def test_an_aborted_request_has_the_routes_of_its_tokens(routed: Served) -> None:
    prompt, shape = prompts(routed.processor)["text"], make_sampling_params(routed).routed_experts
    assert shape is not None
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, routed, {"max_new_tokens": 5000, "ignore_eos": True})
        while num_running(routed) == 0:
            time.sleep(0.05)
        ask(routed, {"max_new_tokens": 3, "ignore_eos": True})  # the first has as many by then
        routed.post("/abort_request", {"abort_all": True})
        answer = asked.result().json()
    how = replace(make_sampling_params(routed), max_new_tokens=5000)
    ((response,),) = parse_generate(answer, [prompt], 1, how)
    assert response.finish == "abort" and len(response.token_ids) > 1
    assert response.routed_experts is not None
    assert len(response.routed_experts) == len(prompt.token_ids) + len(response.token_ids) - 1


def test_a_server_of_megavlm_sends_a_byte_an_expert(routed: Served) -> None:
    prompt, shape = prompts(routed.processor)["text"], make_sampling_params(routed).routed_experts
    assert shape is not None
    answer = ask(routed, {"max_new_tokens": 3, "ignore_eos": True}).json()
    content = base64.b64decode(answer["meta_info"]["routed_experts"])
    rows = len(prompt.token_ids) + 2
    assert len(content) == 1 + rows * shape.num_layers * shape.top_k


def num_running(served: Served) -> int:
    """Return how many requests the server is answering."""
    loads = served.get("/v1/loads?include=core")["loads"]
    return sum(load["num_running_reqs"] for load in loads)


def ask(served: Served, parameters: dict[str, Any]) -> httpx.Response:
    body = {
        "input_ids": list(prompts(served.processor)["text"].request_ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "return_routed_experts": True,
    }
    url, keys = served.server.url + "/generate", bearer(served.server.api_key)
    return httpx.post(url, json=body, headers=keys, timeout=scaled(120))


def test_a_server_without_the_option_is_refused(routed: Served) -> None:
    info = routed.get("/server_info")
    assert Requirements(routed_experts=True).read(info)[:2] == (1, "cpu")
    with pytest.raises(ValueError, match="start it with --enable-return-routed-experts"):
        Requirements(routed_experts=True).read({**info, "enable_return_routed_experts": False})


def cut(response: Response, size: int) -> Response:
    """Return a response as if it had been aborted after `size` tokens."""
    assert response.routed_experts is not None
    lost = len(response.token_ids) - size
    return replace(
        response,
        token_ids=response.token_ids[:size],
        logprobs=response.logprobs[:size],
        finish="abort",
        spans=(VersionSpan(response.weight_version, 0, size),),
        routed_experts=response.routed_experts[:-lost],
    )


def assert_replay_matters(
    served: Served, groups: Sequence[Group], tmp_path: Path, *unsampled: int
) -> None:
    """Check that log-probs of a trainer whose routers choose other experts are the server's with
    replay, and are not without. unsampled: Targets to leave out.
    """
    other = with_ties(served.folder, tmp_path / "trainer", seed=2)
    ((replayed, chosen),) = launch(
        1, compare, other, groups, make_sampling_params(served), unsampled
    )
    assert replayed < 1e-4
    assert chosen > 1e-2, "the routers would have chosen the same experts"


def compare(
    folder: Path, groups: Sequence[Group], how: SamplingParams, unsampled: Sequence[int]
) -> tuple[float, float]:
    """Return the largest difference of log-probs with and without replay."""
    trees = []
    for group in groups:
        of_calls = [
            columns(
                len(response.token_ids),
                rollout_logprobs=torch.from_numpy(response.logprobs),
                sequence_ids=torch.full((len(response.token_ids),), number),
            )
            for number, each in enumerate(group.episodes)
            for response in each.responses
        ]
        trees.append(group_tree(group, of_calls, replays_routing=True))
    images = {image.key: image for group in groups for p in group.prompts for image in p.images}
    config = AutoConfig.from_pretrained(folder)
    run = Run.start(folder, config, Ranks(), ModelOptions(), images)
    pack = make_pack(trees, vision_token_ids=vision_tokens(config))
    assert pack.columns is not None and pack.routed_experts is not None
    num_ends = sum(len(group.episodes) for group in groups)
    assert int((~pack.routed_experts.is_known).sum()) == num_ends, (
        "all tokens but the last of an episode"
    )
    scoring = Scoring(how.temperature, how.suppressed_ids)
    found = []
    for computed in (pack, pack.without_routed_experts()):
        (scores,) = compute_logprobs(run.wrapped, [computed], run.features(), scoring)
        difference = (scores.logprobs - pack.columns.rollout_logprobs).abs()
        difference[list(unsampled)] = 0.0
        found.append(float(difference.max()))
    return found[0], found[1]
