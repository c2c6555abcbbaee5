"""Tokens that a real server kept by top-p and top-k, and the trainer's log-probs among them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from megavlm.data.packs.packing import make_pack
from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server_pool.requirements import Requirements
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.rollout.group_tree import group_tree
from megavlm.rollout.trajectory import Group
from megavlm.training.forward_backward import compute_logprobs
from tests.fakes.fixed_servers import FixedServers
from tests.parity.runs import Run
from tests.parity.table import Ranks
from tests.sglang.conftest import Served
from tests.sglang.questions import next_turns, prompts
from tests.support.calls import episode
from tests.support.columns import columns
from tests.support.families import vision_tokens
from tests.support.fork import launch
from tests.support.generation import generate, generate_some
from tests.support.timeouts import scaled

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]


def compare(folder: Path, groups: Sequence[Group], how: SamplingParams) -> list[float]:
    """Return the largest difference between the log-probs of trainer and server, and the mean ratio
    of their probabilities, with the sets and without them.
    """
    images = {image.key: image for group in groups for p in group.prompts for image in p.images}
    config = AutoConfig.from_pretrained(folder)
    run = Run.start(folder, config, Ranks(), ModelOptions(), images)
    scoring = Scoring(how.temperature, how.suppressed_ids)
    found = []
    for has_sets in (True, False):
        differences = []
        for group in groups:
            responses = [response for each in group.episodes for response in each.responses]
            tree = group_tree(group, [columns(len(r.token_ids)) for r in responses])
            pack = make_pack([tree], vision_token_ids=vision_tokens(config))
            pack = pack if has_sets else replace(pack, kept=None)
            (scores,) = compute_logprobs(run.wrapped, [pack], run.features(), scoring)
            theirs = torch.from_numpy(np.concatenate([r.logprobs for r in responses]))
            differences.append(scores.logprobs - theirs)
        joined = torch.cat(differences)
        found += [float(joined.abs().max()), float(joined.exp().mean())]
    return found


@pytest.mark.slow
def test_log_probs_among_the_kept_tokens_are_the_servers(served: Served) -> None:
    """Of 10,000 tokens, with images, after tools, and over a pause."""
    suppressed = (*served.processor.suppressed_ids, served.processor.eos_id)
    how = SamplingParams(
        0.3, 64, suppressed_ids=suppressed, top_p=0.8, top_k=100, returns_kept=True
    )
    by_name = prompts(served.processor) | next_turns(served.processor)
    asked = list(by_name.values())
    answers = generate(served.client, asked, n=20, sampling_params=how)
    long, paused, server = replace(how, max_new_tokens=512), asked[:1], served.server
    routing = FixedServers(server.url, api_key=server.api_key, admin_key=server.admin_key)
    with RolloutClient(routing, RequestLimits(total=scaled(120))) as client:
        begun, after = [[]], 0.5
        while not any(len(response.token_ids) for response in begun[0]):
            begun = generate_some(client, paused, 0, begun, after, n=2, sampling_params=long)
            after *= 2  # a busy machine may have sampled nothing yet
        assert any(0 < len(response.token_ids) < 512 for response in begun[0])
        answers += generate(client, paused, begun=begun, n=2, sampling_params=long)
    groups = [
        Group(prompt, episodes=[episode((prompt, response)) for response in responses])
        for prompt, responses in zip(asked + paused, answers, strict=True)
    ]
    responses = [response for group in answers for response in group]
    assert sum(len(response.token_ids) for response in responses) >= 10_000
    sizes = np.concatenate([r.kept.sizes for r in responses if r.kept is not None])
    assert 5 < sizes.mean() < 90 and len(sizes) >= 10_000
    ((difference, ratio, whole_difference, whole_ratio),) = launch(
        1, compare, served.folder, groups, how
    )
    assert difference < 1e-5
    assert ratio == pytest.approx(1, abs=1e-6)
    assert whole_difference > 0.1 and whole_ratio < 0.9


@pytest.mark.slow
def test_a_server_tells_how_many_tokens_it_returns(served: Served) -> None:
    info = served.get("/server_info")
    assert Requirements(kept_tokens=4096).read(info)[:2] == (1, "cpu")
    with pytest.raises(ValueError, match="returns at most 4096 tokens"):
        Requirements(kept_tokens=4097).read(info)
