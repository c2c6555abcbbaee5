"""A teacher's log-probs of played episodes: which responses it scores, and what failures do."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
from megavlm.rollout.groups import policy_trees
from megavlm.rollout.trajectory import Group
from tests.support.timeouts import scaled
from tests.unit.rollout.scripted import ROW, RUNNER, Policy, episode_runner

TWO_TURNS: dict[str, Any] = {"max_turns": 2, "max_observation_tokens": 64}
TEXTS = ("5", "3", "4", "3", "1")  # the first and the third episode try again


class Server(ThreadingHTTPServer):
    """Answers as SGLang does: a token's log-prob is its negative id over 100. statuses: Of the next
    answers; afterwards all are 200. spoils: Changes an answer.
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
        return {"meta_info": {"prompt_tokens": len(ids) + more, "input_token_logprobs": scored}}

    def log_message(self, *_: Any) -> None:
        pass


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
    processor: Processor, manager: RewardManager, server: Server, *, trained: bool = True
) -> Group:
    teacher = Teacher(Distillation(urls=(server.url,)))
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
