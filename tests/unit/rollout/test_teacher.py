"""A teacher's log-probs of played episodes: which responses it scores, and what failures do."""

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from megavlm.config.algorithm import GRPO
from megavlm.config.distillation import Distillation
from megavlm.config.reward import Reward
from megavlm.data.processor import Processor
from megavlm.inference.requests import RequestLimits
from megavlm.inference.teacher import Teacher
from megavlm.rewards.base import RewardStop
from megavlm.rewards.manager import Part, RewardManager
from megavlm.rollout.groups import policy_trees, rollout_metrics
from megavlm.rollout.trajectory import Group
from tests.support.timeouts import scaled
from tests.unit.rollout.scripted import ROW, RUNNER, Policy, episode_runner

SAMPLED, FORWARD = Distillation(), Distillation(divergence="forward_topk", top_k=3)
TWO_TURNS: dict[str, Any] = {"max_turns": 2, "max_observation_tokens": 64}
TEXTS = ("5", "3", "4", "3", "1")  # the first and the third episode try again


class Server(ThreadingHTTPServer):
    """Answers as SGLang does: a token's log-prob is its negative id over 100, and the likeliest
    tokens are those after it, of log-probs -1, -2, ... statuses: Of the next answers; afterwards
    all are 200. spoils: Changes an answer.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.num_images = 0
        self.spoils: Any = lambda items: items

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        answer = json.dumps(self.server.spoils([self.item(ids, body) for ids in body["input_ids"]]))
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def item(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        assert body["sampling_params"] == {"max_new_tokens": 0} and body["return_logprob"]
        more = self.server.num_images  # tokens of images, of which a request has one
        tokens = ids[body["logprob_start_len"] - more :]
        scored = [[None, tokens[0], None], *([-t / 100, t, None] for t in tokens[1:])]
        meta = {"prompt_tokens": len(ids) + more, "input_token_logprobs": scored}
        if k := body.get("top_logprobs_num", 0):
            assert body["return_flat_raw_top_logprobs"] and body["return_flat_raw_top_logprobs_b64"]
            likeliest = np.array(tokens[1:], np.int32)[:, None] + np.arange(1, k + 1)
            name, logprobs = (
                "input_top_logprobs",
                np.broadcast_to(-np.arange(1, k + 1), (len(likeliest), k)),
            )
            meta |= {
                f"{name}_shape": [len(likeliest), k],
                f"{name}_null_prefix": 1,
                f"{name}_idx_flat_b64": encoded(likeliest, "<i4"),
                f"{name}_val_flat_b64": encoded(logprobs, "<f4"),
            }
        return {"meta_info": meta}

    def log_message(self, *_: Any) -> None:
        pass


def encoded(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


@pytest.fixture
def server(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(RequestLimits, "retry_delay", 0.0)
    with Server() as server:
        prompt = processor.prompt(ROW)
        server.num_images = len(prompt.token_ids) - len(prompt.short_ids)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def manager() -> Iterator[RewardManager]:
    manager = make()
    yield manager
    asyncio.run(manager.close())


def make(**settings: Any) -> RewardManager:
    limits = Reward(workers=1, timeout=scaled(30), memory_mb=1024, **settings)
    return RewardManager([Part("right", "vqa")], limits)


def played(
    processor: Processor,
    manager: RewardManager,
    server: Server,
    settings: Distillation = SAMPLED,
    *,
    trained: bool = True,
) -> Group:
    teacher = Teacher(replace(settings, urls=(server.url,)))
    playing = episode_runner(processor, manager, "vqa_retry", teacher=teacher, **TWO_TURNS)
    group = Group(processor.prompt(ROW))
    if trained:
        RUNNER.run(playing.start_or_replace([group], 3, lambda count: []))
    else:
        RUNNER.run(playing.start([group], 3))
    try:
        RUNNER.run(playing.play([group], Policy(processor, *TEXTS)))
    finally:
        RUNNER.run(teacher.close())
        RUNNER.run(playing._environments.close())
    return group


def test_each_response_of_several_turns_is_scored(
    processor: Processor, manager: RewardManager, server: Server
) -> None:
    server.statuses = [500]
    group = played(processor, manager, server)
    assert group.is_played and len(server.asked) == 4, "first turns at once, and one more attempt"
    assert sorted(len(body["input_ids"]) for body in server.asked) in ([1, 1, 1, 3], [1, 1, 3, 3])
    (tree,) = policy_trees([group], GRPO(), max_new_tokens=32, max_turns=2, has_teacher=True)
    targets = [segment for segment in tree.segments if segment.is_target]
    assert len(targets) == 5
    for segment in targets:
        assert segment.columns is not None and segment.columns.teacher_logprobs is not None
        torch.testing.assert_close(segment.columns.teacher_logprobs, -segment.token_ids / 100)


def test_each_token_has_the_likeliest_tokens_at_its_place(
    processor: Processor, manager: RewardManager, server: Server
) -> None:
    group = played(processor, manager, server, FORWARD)
    (tree,) = policy_trees([group], GRPO(), max_new_tokens=32, max_turns=2, has_teacher=True)
    for segment in tree.segments:
        if not segment.is_target:
            assert segment.teacher is None
            continue
        assert segment.teacher is not None and segment.teacher.logprobs is not None
        assert segment.teacher.sizes.tolist() == [3] * len(segment.token_ids)
        likeliest = segment.token_ids[:, None] + torch.arange(1, 4)
        assert segment.teacher.ids.tolist() == likeliest.flatten().tolist()
        assert segment.teacher.logprobs.tolist() == [-1, -2, -3] * len(segment.token_ids)
    (without,) = policy_trees([group], GRPO(), max_new_tokens=32, max_turns=2)
    assert all(segment.teacher is None for segment in without.segments)
    num_tokens = sum(len(r.token_ids) for e in group.episodes for r in e.responses)
    expected = {
        "teacher_bytes": 4 * num_tokens + 8 * 3 * num_tokens,
        "teacher_rest": 1 - np.exp([-1.0, -2.0, -3.0]).sum(),
    }
    metrics = rollout_metrics([group])
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("idx_flat_b64", encoded(np.zeros(2), "<i4"), "likeliest tokens of"),
        ("val_flat_b64", None, "TypeError"),
        ("null_prefix", 0, "likeliest tokens of"),
        ("shape", None, r"set distillation\.divergence=sampled"),
    ],
)
def test_other_likeliest_tokens_are_no_answer(
    processor: Processor, server: Server, key: str, value: Any, problem: str
) -> None:
    def spoiled(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for item in items:
            if key == "shape":
                del item["meta_info"]["input_top_logprobs_shape"]
            else:
                item["meta_info"][f"input_top_logprobs_{key}"] = value
        return items

    stops, server.spoils = make(on_failure="stop"), spoiled
    with pytest.raises(RewardStop, match=problem):
        played(processor, stops, server, FORWARD)
    asyncio.run(stops.close())


def test_an_evaluation_asks_no_teacher(
    processor: Processor, manager: RewardManager, server: Server
) -> None:
    group = played(processor, manager, server, trained=False)
    assert group.is_played and not server.asked


@pytest.mark.parametrize(
    "spoils",
    [
        lambda items: items[:-1],
        lambda items: "no list",
        lambda items: [{"meta_info": {}}] * len(items),
        lambda items: [shifted(item, "prompt_tokens") for item in items],
        lambda items: [shifted(item, "input_token_logprobs") for item in items],
    ],
)
def test_what_a_teacher_does_not_score_is_a_failed_reward(
    processor: Processor, server: Server, spoils: Any
) -> None:
    manager = make(failure_value=-1.0)
    server.spoils = spoils
    group = played(processor, manager, server)
    asyncio.run(manager.close())
    assert group.is_played and [score.reward for score in group.scores] == [-1.0] * 3
    assert manager.failures == {"remote": 3}
    (tree,) = policy_trees([group], GRPO(), max_new_tokens=32, max_turns=2, has_teacher=True)
    columns = [segment.columns for segment in tree.segments if segment.columns is not None]
    assert all(x.teacher_logprobs is not None and x.teacher_logprobs.isnan().all() for x in columns)


def shifted(item: dict[str, Any], key: str) -> dict[str, Any]:
    meta = item["meta_info"]
    other = meta[key] + 1 if key == "prompt_tokens" else meta[key][:1] + meta[key][:-1]
    return {"meta_info": {**meta, key: other}}


def test_a_refused_request_is_skipped_or_ends_the_run(processor: Processor, server: Server) -> None:
    skips, stops = make(on_failure="skip"), make(on_failure="stop")
    server.statuses = [400] * 9
    group = played(processor, skips, server)
    assert [score.skipped for score in group.scores] == [True] * 3
    assert len(server.asked) <= 3, "it is not sent again"
    with pytest.raises(RewardStop, match=r"the teacher gave no log-probs: http.*HTTP 400"):
        played(processor, stops, server)
    for manager in (skips, stops):
        asyncio.run(manager.close())
