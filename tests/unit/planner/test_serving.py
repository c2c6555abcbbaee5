"""Modelled servers: bytes by hand, and the rollout against a simulation of one token at a time."""

from dataclasses import replace
from pathlib import Path

import pytest

from megavlm.config.load import load
from megavlm.planner.memory import GPU, server_memory
from megavlm.planner.serving import STATES_PER_REQUEST, ServerModel
from megavlm.planner.work import StepWork
from tests.support.releases import released_config
from tests.unit.config.test_recipes import RECIPES, URLS

WORK = StepWork(prompts=12, responses=4, prompt=200, response=50, longest=100, patches=1024)


def server(recipe: str, release: str, folder: Path, *keys: str) -> ServerModel:
    urls = URLS if "nodes" in recipe else []
    config = load(RECIPES / f"grpo/{recipe}.yaml", [*urls, *keys])
    hf_config = released_config(release, folder)
    memory = server_memory(config, hf_config, GPU)
    return ServerModel.of(config, hf_config, memory, StepWork.of(config, hf_config))


def seven(folder: Path, *keys: str) -> ServerModel:
    return server("qwen2_5_vl_7b_geo3k", "Qwen2.5-VL-7B", folder, *keys)


def test_a_layer_with_attention_has_a_cache_and_one_without_has_a_state(tmp_path: Path) -> None:
    """Of Qwen3.5-9B's 32 layers eight have a cache. The others keep 32 x 128 x 128 numbers in fp32,
    and three inputs of a convolution over 8,192 channels. A rank has a quarter of the heads.
    """
    nine = server("qwen3_5_9b_geo3k", "Qwen3.5-9B", tmp_path)
    assert nine.token == 2 * 8 * 1 * 256 * 2
    assert nine.state == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) / 4
    assert nine.states == pytest.approx(4 * nine.cache)
    assert nine.max_running(WORK) == int(nine.states / nine.state / STATES_PER_REQUEST)
    sglangs = "rollout.server_args.mamba_full_memory_ratio=null"
    fewer = server("qwen3_5_9b_geo3k", "Qwen3.5-9B", tmp_path, sglangs)
    assert fewer.states == pytest.approx(0.9 * fewer.cache)
    assert nine.max_running(WORK) > 1.5 * fewer.max_running(WORK)
    dense = seven(tmp_path)
    assert (dense.token, dense.state, dense.states) == (2 * 28 * 1 * 128 * 2, 0, 0)


def test_a_prompt_is_stored_once_for_its_responses(tmp_path: Path) -> None:
    model = seven(tmp_path)
    alone = replace(WORK, responses=1)
    assert model.max_running(alone) == int(model.cache / model.token / (200 + WORK.resident))
    assert model.max_running(WORK) == int(model.cache / model.token / (50 + WORK.resident))


@pytest.mark.parametrize(("response", "longest"), [(50, 100), (350, 2048), (1673, 2048)])
def test_lengths_have_their_mean_and_their_longest(response: int, longest: int) -> None:
    work = replace(WORK, response=response, longest=longest)
    lengths = work.lengths(2000)
    assert sum(lengths) / 2000 == pytest.approx(response, rel=0.01) and max(lengths) == longest
    assert sum(lengths[:500]) / 500 == pytest.approx(response, rel=0.03), "mixed"
    weighted = sum(length**2 for length in lengths) / 2 / sum(lengths)
    assert work.resident == pytest.approx(weighted, rel=0.01)


def by_tokens(model: ServerModel, work: StepWork) -> float:
    """Seconds of a rollout, one decoding step after the other."""
    waiting = [*enumerate(work.lengths(work.prompts * work.responses))]
    running: list[list[int]] = []  # group, tokens so far, length
    open_groups: dict[int, int] = {}
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) < model.max_running(work):
            group = waiting[0][0] // work.responses
            if group not in open_groups and len(open_groups) == model.concurrency:
                break
            if group not in open_groups:
                open_groups[group] = work.responses
                seconds += model.prefill_seconds(work)
            running.append([group, 0, waiting.pop(0)[1]])
        context = work.prompt + sum(done + 0.5 for _, done, _ in running) / len(running)
        seconds += model.decode_seconds(len(running), context)
        for response in running:
            response[1] += 1
            open_groups[response[0]] -= response[1] == response[2]
        running = [x for x in running if x[1] < x[2]]
        open_groups = {group: left for group, left in open_groups.items() if left}
    return seconds


@pytest.mark.parametrize("concurrency", [3, 12])
@pytest.mark.parametrize("cached", [500, 1000, 100_000])
def test_a_rollout_is_the_sum_of_its_decoding_steps(
    concurrency: int, cached: int, tmp_path: Path
) -> None:
    """With places for few prompts, with a cache for few responses, and with neither bound."""
    model = seven(tmp_path)
    model = replace(model, concurrency=concurrency, cache=cached * model.token)
    expected = by_tokens(model, WORK)
    assert model.rollout_seconds(WORK, WORK.prompts) == pytest.approx(expected, rel=1e-6)
    ends = model.group_seconds(WORK, WORK.prompts)
    assert len(ends) == WORK.prompts and ends == sorted(ends)
    assert ends[-1] == model.rollout_seconds(WORK, WORK.prompts)


def test_images_hold_places_only_below_the_recipe_s_bound(tmp_path: Path) -> None:
    assert seven(tmp_path).concurrency == 256
    assert seven(tmp_path, "rollout.image_tokens=65536").concurrency == 42


def test_requests_beyond_the_cuda_graphs_wait_for_python(tmp_path: Path) -> None:
    model = seven(tmp_path)
    assert model.graphs == 1024, "as the server is started with"
    short = seven(tmp_path, "rollout.server_args.cuda_graph_max_bs_decode=16")
    assert short.decode_seconds(16, 500) == model.decode_seconds(16, 500)
    assert short.decode_seconds(17, 500) > model.decode_seconds(17, 500) + 1e-3
    assert short.decode_seconds(900, 2500) == model.decode_seconds(900, 2500), "hidden"


def test_few_tokens_read_few_experts(tmp_path: Path) -> None:
    model = server("qwen3_vl_30b_a3b_geo3k_nodes", "Qwen3-VL-30B-A3B", tmp_path)
    assert model.routed == 8 / 128 and model.experts > 10 * model.weights
    plain = replace(model, routed=1.0)
    assert model.decode_seconds(1, 500) < plain.decode_seconds(1, 500) - 0.5 * (
        model.experts / model.rates.memory
    )
    assert model.decode_seconds(500, 500) < plain.decode_seconds(500, 500) + 1e-9


def test_more_ranks_reduce_more_often(tmp_path: Path) -> None:
    """Small batches gain nothing from ranks, since the all-reduces take as long as the weights."""
    one, four = (
        seven(tmp_path, f"rollout.tensor_parallel={ranks}", "parallel.data=1") for ranks in (1, 4)
    )
    gained = one.decode_seconds(1, 500) - four.decode_seconds(1, 500)
    read = (one.weights - four.weights) / one.rates.memory
    assert gained < read - 56 * one.rates.all_reduce + 1e-4


DRAFTING = "rollout.server_args.speculative_algorithm=NEXTN"


def test_an_eagle3_head_is_dense_and_reads_three_hidden_states(tmp_path: Path) -> None:
    eagle3 = "rollout.server_args={speculative_algorithm: EAGLE3, speculative_draft_model_path: h}"
    model = server("qwen3_vl_30b_a3b_geo3k_nodes", "Qwen3-VL-30B-A3B", tmp_path, eagle3)
    hidden, query, keys, ffn = 2048, 32 * 128, 4 * 128, 6144
    attention = (query + 2 * keys) * 2 * hidden + query * hidden
    cut, whole = 151936 * hidden + attention + 3 * ffn * hidden, 3 * hidden**2
    assert model.drafts == 3
    assert model.head == pytest.approx(2 * (cut / model.ranks + whole), rel=0.01)


def test_drafts_pay_where_few_requests_read_many_weights(tmp_path: Path) -> None:
    """A pass over four tokens reads the weights once, and computes and samples four times. Three
    drafts read the head and the output layer.
    """
    plain = server("qwen3_5_9b_geo3k", "Qwen3.5-9B", tmp_path)
    model = server("qwen3_5_9b_geo3k", "Qwen3.5-9B", tmp_path, DRAFTING)
    assert (model.drafts, model.accepted) == (3, 2.0)
    output, layer = 248320 * 4096 * 2, 210e6 * 2  # a layer with attention of the released sizes
    whole = 2 * 4096**2 * 2  # `mtp.fc`, on each rank
    assert model.head == pytest.approx((output + layer) / 4 + whole, rel=0.01)
    assert plain.max_running(WORK) > 48 == model.max_running(WORK)
    more = "rollout.server_args.max_running_requests=4096"
    many = server("qwen3_5_9b_geo3k", "Qwen3.5-9B", tmp_path, DRAFTING, more)
    assert many.max_running(WORK) == int(many.states / many.state / (STATES_PER_REQUEST + 4))
    assert 1.0 < model.least_accepted(1, 1000) < 1.5 < model.least_accepted(512, 1000)
    one = plain.decode_seconds(1, 1000)
    assert one / model.decode_seconds(1, 1000) == pytest.approx(2.0 / model.least_accepted(1, 1000))
