"""An agent plays through the gateway with the real server: the trainer's log-probs of the tree of
its calls are those that were recorded.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megavlm.config.algorithm import GRPO
from megavlm.config.distillation import Distillation, TeacherConfig
from megavlm.config.environment import EnvironmentConfig
from megavlm.data.packs.packing import make_pack
from megavlm.data.packs.trees import Tree
from megavlm.data.rows import Row
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.teacher import API_KEY
from megavlm.models.common.config import ModelOptions
from megavlm.rollout.episodes import EpisodeRunner
from megavlm.rollout.groups import policy_trees
from megavlm.rollout.teachers import Teachers
from megavlm.rollout.trajectory import Group
from tests.parity.runs import Run
from tests.parity.table import LAYOUTS
from tests.sglang.conftest import Served
from tests.support.families import vision_tokens
from tests.support.fork import launch
from tests.support.random_images import image
from tests.support.timeouts import scaled
from tests.unit.rollout.scripted import graded

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]
TOP_K = 8
USER = Path(__file__).parents[1] / "unit" / "rollout" / "user"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "qwen3_vl"])
def test_the_trainers_logprobs_are_those_of_the_agents_calls_and_of_a_teacher(
    servers: Callable[[str], Served], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher is the policy itself; its log-probs are of all tokens, suppressed ones too."""
    monkeypatch.setenv("PYTHONPATH", str(USER), prepend=os.pathsep)
    served = servers(family).restore()
    monkeypatch.setenv(API_KEY, served.server.api_key)
    processor = served.processor
    given = Distillation(
        teachers={"itself": TeacherConfig(urls=(served.server.url,))},
        divergence="forward_topk",
        top_k=TOP_K,
    )
    teachers = Teachers(given, processor)
    how = SamplingParams(
        1.0, 12, suppressed_ids=processor.suppressed_ids, stop_ids=processor.stop_ids
    )
    row = Row(0, "<image>Find x.", "3", (image(112, 84, 1),), "", "test:0")
    config: Any = SimpleNamespace(
        environment=EnvironmentConfig(
            name="gateway",
            max_turns=16,
            max_tokens=8192,
            timeout=scaled(60),
            options={"agent": "agents:plays_everything"},
        ),
        rollout=SimpleNamespace(max_new_tokens=12),
        run=SimpleNamespace(seed=0),
        data=SimpleNamespace(system_prompt=None, long_prompts="refuse"),
    )
    group = Group(processor.prompt(row))
    with served.client as client:
        playing = EpisodeRunner(config, processor, graded(), client.runner, teachers)
        try:
            started = client.run(playing.start_or_replace([group], 2, lambda count: []))
            client.run(playing.play(started, partial(client.generate, sampling_params=how)))
        finally:
            client.run(playing.close())
    assert group.is_played and [episode.score.failure for episode in group.episodes] == [None, None]
    for episode in group.episodes:
        assert len(episode.responses) == 7 and episode.counts["branches"] == 3
        assert episode.counts["cancelled_calls"] <= 1
        assert episode.counts["unmatched_messages"] == 1
    (tree,) = policy_trees([group], GRPO(), max_new_tokens=12, max_turns=16, distillation=given)
    images = {shown.key: shown for prompt in group.prompts for shown in prompt.images}
    (largest,) = launch(1, largest_differences, served.folder, tree, images, how.suppressed_ids)
    assert max(largest) < 1e-4


def largest_differences(
    folder: Path, tree: Tree, images: Any, suppressed: tuple[int, ...]
) -> list[float]:
    """Between the trainer's log-probs and those that the server recorded, the teacher's, and the
    teacher's of its likeliest tokens.
    """
    config = AutoConfig.from_pretrained(folder)
    run = Run.start(folder, config, LAYOUTS["one rank"], ModelOptions(), images)
    pack = make_pack([tree], vision_token_ids=vision_tokens(config))
    (logits,) = run.logits([pack])
    columns, found = pack.columns, []
    assert columns is not None and columns.teacher_logprobs is not None
    of_all = logits.clone()
    logits[:, list(suppressed)] = -torch.inf
    for given, theirs in (
        (logits, columns.rollout_logprobs),
        (of_all, columns.teacher_logprobs),
    ):
        logprobs = given.log_softmax(-1).gather(1, pack.target_ids[:, None])[:, 0]
        assert len(logprobs) == pack.num_targets
        found.append(float((logprobs - theirs).abs().max()))
    assert pack.teacher is not None
    ids, theirs = pack.teacher.table()
    logprobs = of_all.log_softmax(-1)
    assert ids.shape == (pack.num_targets, TOP_K)
    for ours in (logprobs.gather(1, ids.long()), logprobs.topk(TOP_K).values):
        found.append(float((ours - theirs).abs().max()))
    return found
