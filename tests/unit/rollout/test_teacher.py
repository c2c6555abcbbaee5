"""Teachers' log-probs of played episodes: which responses they score, and what failures do."""

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from megavlm.config.algorithm import GRPO
from megavlm.config.distillation import Distillation, TeacherConfig
from megavlm.data.packs.trees import Tree
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.inference.bodies import IN_BODY
from megavlm.inference.protocol import SamplingParams, Scored
from megavlm.inference.requests import Request, RequestLimits
from megavlm.inference.server import ClaimedPort
from megavlm.inference.teacher import Teacher
from megavlm.rewards.base import RewardStop
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.groups import policy_trees, rollout_metrics
from megavlm.rollout.teachers import Teachers
from megavlm.rollout.trajectory import Group
from tests.support.responses import make_response
from tests.support.timeouts import scaled
from tests.unit.rollout.scripted import ROW, RUNNER, Policy, episode_runner, fails

FORWARD: dict[str, Any] = {"divergence": "forward_topk", "top_k": 3}
TWO_TURNS: dict[str, Any] = {"max_turns": 2, "max_observation_tokens": 64}
TEXTS = ("5", "3", "4", "3", "1")  # the first and the third episode try again


class Server(ThreadingHTTPServer):
    """Answers as SGLang does: a token's log-prob is its negative id over 100, and the likeliest
    tokens are those after it, of log-probs -1, -2, ... statuses: Of the next answers; afterwards
    all are 200. spoils: Changes an answer. counted: The requests for only the number of tokens.
    num_images: Tokens of the image in a prompt, less the one that is sent.
    """

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.asked: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.num_images, self.takes_images = 0, True
        self.counted: list[dict[str, Any]] = []
        self.spoils: Any = lambda items: items

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "return_logprob" not in body:
            self.server.counted.append(body)
            (ids,) = body["input_ids"]
            counted = len(ids) + self.num_images(body)
            self.answer(200, [{"meta_info": {"prompt_tokens": counted}}])
            return
        self.server.asked.append(body)
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        items = [self.item(ids, body) for ids in body["input_ids"]]
        self.answer(status, self.server.spoils(items))

    def do_GET(self) -> None:
        assert self.path == "/model_info"
        self.answer(200, {"has_image_understanding": self.server.takes_images})

    def answer(self, status: int, content: Any) -> None:
        answer = json.dumps(content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def num_images(self, body: dict[str, Any]) -> int:
        """Tokens of the image, of which a request has one."""
        return self.server.num_images if "image_data" in body else 0

    def item(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        assert body["sampling_params"] == {"max_new_tokens": 0}
        more = self.num_images(body)
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


@contextmanager
def serving(processor: Processor, port: int = 0) -> Iterator[Server]:
    with Server(port) as server:
        prompt = processor.prompt(ROW)
        server.num_images = len(prompt.token_ids) - len(prompt.short_ids)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(RequestLimits, "retry_delay", 0.0)
    with serving(processor) as server:
        yield server


def of_urls(*urls: str, **settings: Any) -> Distillation:
    return Distillation(teachers={"large": TeacherConfig(urls=urls)}, **settings)


def played(
    processor: Processor,
    manager: RewardManager,
    given: Server | Distillation,
    *,
    trained: bool = True,
    row: Row = ROW,
) -> Group:
    """Play an episode of two turns, and two of one."""
    settings = given if isinstance(given, Distillation) else of_urls(given.url)
    teachers = Teachers(settings, processor)
    playing = episode_runner(processor, manager, "vqa_retry", teachers=teachers, **TWO_TURNS)
    group = Group(processor.prompt(row))
    if trained:
        RUNNER.run(playing.start_or_replace([group], 3, lambda count: []))
    else:
        RUNNER.run(playing.start([group], 3))
    try:
        RUNNER.run(playing.play([group], Policy(processor, *TEXTS)))
    finally:
        RUNNER.run(teachers.close())
        RUNNER.run(playing._environments.close())
    return group


@pytest.mark.parametrize("more", [0, 3, -1])
def test_each_response_of_several_turns_is_scored(
    processor: Processor, manager: RewardManager, server: Server, more: int
) -> None:
    """By a teacher whose image has as many tokens, more or fewer."""
    server.num_images += more
    server.statuses = [500]
    group = played(processor, manager, server)
    assert group.is_played and len(server.asked) == 4, "first turns at once, and one more attempt"
    assert all(len(body["input_ids"][0]) < 100 for body in server.counted)
    assert sorted(len(body["input_ids"]) for body in server.asked) in ([1, 1, 1, 3], [1, 1, 3, 3])
    tree = tree_of(group, of_urls(server.url))
    targets = [segment for segment in tree.segments if segment.is_target]
    assert len(targets) == 5
    for segment in targets:
        assert segment.columns is not None and segment.columns.teacher_logprobs is not None
        torch.testing.assert_close(segment.columns.teacher_logprobs, -segment.token_ids / 100)
        assert segment.columns.teacher_ids is not None and not segment.columns.teacher_ids.any()


def test_a_row_has_the_teacher_of_its_category(
    processor: Processor, manager: RewardManager, server: Server
) -> None:
    with serving(processor) as other:
        of_counting = TeacherConfig(urls=(other.url,), rows=("counting", "listing"))
        others = TeacherConfig(urls=(server.url,), rows=("naming",))
        settings = Distillation(teachers={"names": others, "counts": of_counting})
        for category, teacher, asked in (("naming", 0, server), ("listing", 1, other)):
            group = played(processor, manager, settings, row=replace(ROW, category=category))
            assert len(asked.asked) == 3 and len(server.asked) + len(other.asked) == 3
            asked.asked.clear()
            assert {*numbers(group, settings)} == {teacher}
        group = played(processor, manager, settings, row=replace(ROW, category="telling"))
        assert not server.asked + other.asked and {*numbers(group, settings)} == {-1}
        assert all(score.failure is None for score in group.scores)
        rest = replace(others, rows=())
        settings = Distillation(teachers={"counts": of_counting, "rest": rest})
        assert [settings.teacher_of(x) for x in ("listing", "", "x")] == ["counts", "rest", "rest"]


def numbers(group: Group, settings: Distillation) -> list[int]:
    """Number of each token's teacher."""
    columns = [s.columns for s in tree_of(group, settings).segments if s.columns is not None]
    return [
        number for x in columns if x.teacher_ids is not None for number in x.teacher_ids.tolist()
    ]


def test_a_lost_server_is_left_out_and_asked_again(
    processor: Processor, manager: RewardManager, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it answers, and for distillation.timeout if no other is left."""
    port = ClaimedPort()
    with serving(processor, port.number) as lost:
        pass
    settings = of_urls(lost.url, server.url, timeout=scaled(20))
    assert all(s.failure is None for s in played(processor, manager, settings).scores)
    assert len(server.asked) == 3

    async def ask_often() -> None:
        teacher = Teacher(of_urls(failing.url, server.url), "large")
        for _ in range(6):
            await teacher.logprobs(processor.prompt(row), [make_response((5,), (-0.1,))])
        await teacher.close()

    row = replace(ROW, problem="How many?", images=())
    with serving(processor) as failing, monkeypatch.context() as patch:
        patch.setattr(RequestLimits, "pause", lambda limits, attempts: 60.0)
        failing.statuses = [500] * 9
        RUNNER.run(ask_often())
        assert len(failing.asked) == 1 and len(server.asked) == 3 + 6

    async def ask_and_reopen(stack: ExitStack) -> None:
        teacher = Teacher(of_urls(lost.url, timeout=scaled(20)), "large")
        call = teacher.logprobs(processor.prompt(row), [make_response((5,), (-0.1,))])
        asking = asyncio.create_task(call)
        await asyncio.sleep(0.5)
        assert not asking.done()
        stack.enter_context(serving(processor, port.number))
        await asking
        await teacher.close()

    monkeypatch.setattr(RequestLimits, "pause", lambda limits, attempts: 0.05)
    with ExitStack() as stack:
        RUNNER.run(ask_and_reopen(stack))
    group = played(processor, manager, of_urls(lost.url, timeout=0.2))
    assert [score.failure for score in group.scores] == ["remote"] * 3


def test_images_for_a_teacher_without_images_end_the_run(
    processor: Processor, manager: RewardManager, server: Server
) -> None:
    server.takes_images = False
    with pytest.raises(ValueError, match=r"rows:5 has images, but its teacher distillation.teach"):
        played(processor, manager, server)
    group = played(processor, manager, server, row=replace(ROW, problem="How many?", images=()))
    assert all(score.failure is None for score in group.scores) and len(server.asked) == 3


def test_the_policy_scores_with_its_adapter_and_its_cache(processor: Processor) -> None:
    how = SamplingParams(1.0, 8, adapter="megavlm-7", cache_key="run-7")
    responses = [make_response((5, 6), (-0.1, -0.2))]
    request = Request([0], [processor.prompt(ROW)], 1, scored=Scored(responses, 3))
    body = json.loads(b"".join(request.body(how, IN_BODY)))
    assert (body["lora_path"], body["extra_key"]) == ("megavlm-7", "run-7")
    assert body["top_logprobs_num"] == 3
    assert body["input_ids"][0][-2:] == [5, 6] and body["sampling_params"]["max_new_tokens"] == 0


HINT = "\n\nIt is {answer}, as {source} says. <|im_end|>"


@pytest.mark.parametrize("is_policy", [False, True])
def test_a_hint_is_read_by_the_teacher_only(
    processor: Processor, manager: RewardManager, server: Server, is_policy: bool
) -> None:
    """At the end of the last message of each turn. The policy itself may be the teacher."""
    urls = () if is_policy else (server.url,)
    settings = Distillation(teachers={"told": TeacherConfig(urls=urls, hint=HINT)})
    row = replace(ROW, extra={"source": "a book"})
    group = played(processor, manager, settings, row=row)
    assert {*numbers(group, settings)} == {0} and len(server.asked) == 3 * (not is_policy)
    for episode in group.episodes:
        for prompt, response in zip(episode.prompts, episode.responses, strict=True):
            read = processor.hinted(prompt, "\n\nIt is 3, as a book says. <|im_end|>")
            text, plain = (processor._tokenizer.decode(p.short_ids) for p in (read, prompt))
            end = "<|im_end|>\n<|im_start|>assistant\n"
            hint = "\n\nIt is 3, as a book says. < |im_end|>"
            assert text == plain.removesuffix(end) + hint + end
            assert [image.key for image in read.images] == [image.key for image in prompt.images]
            assert response.teacher_logprobs is not None
            if is_policy:
                assert (response.teacher_logprobs == -len(read.short_ids)).all()
            else:
                sent = [*read.request_ids, *response.token_ids.tolist()]
                assert sent in [ids for body in server.asked for ids in body["input_ids"]]
    group = played(processor, manager, settings, row=replace(row, extra={"source": None}))
    assert all(r.teacher_logprobs is None for e in group.episodes for r in e.responses)
    assert len(server.asked) == 3 * (not is_policy)


def test_each_token_has_the_likeliest_tokens_at_its_place(
    processor: Processor, manager: RewardManager, server: Server
) -> None:
    forward = of_urls(server.url, **FORWARD)
    group = played(processor, manager, forward)
    for segment in tree_of(group, forward).segments:
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

    server.spoils = spoiled
    with pytest.raises(RewardStop, match=problem):
        played(processor, fails("stop"), of_urls(server.url, **FORWARD))


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
    manager, server.spoils = fails("zero"), spoils
    group = played(processor, manager, server)
    assert group.is_played and [score.reward for score in group.scores] == [0.0] * 3
    assert manager.failures == {"remote": 3}
    tree = tree_of(group, of_urls(server.url))
    columns = [segment.columns for segment in tree.segments if segment.columns is not None]
    assert all(x.teacher_logprobs is not None and x.teacher_logprobs.isnan().all() for x in columns)


def tree_of(group: Group, distillation: Distillation) -> Tree:
    (tree,) = policy_trees(
        [group], GRPO(), max_new_tokens=32, max_turns=2, distillation=distillation
    )
    return tree


def shifted(item: dict[str, Any], key: str) -> dict[str, Any]:
    meta = item["meta_info"]
    other = meta[key] + 1 if key == "prompt_tokens" else meta[key][:1] + meta[key][:-1]
    return {"meta_info": {**meta, key: other}}


def test_a_refused_request_is_skipped_or_ends_the_run(processor: Processor, server: Server) -> None:
    server.statuses = [400] * 9
    group = played(processor, fails("skip"), server)
    assert [score.skipped for score in group.scores] == [True] * 3
    assert len(server.asked) <= 3, "it is not sent again"
    with pytest.raises(RewardStop, match=r"the teacher large gave no log-probs: http.*HTTP 400"):
        played(processor, fails("stop"), server)
