"""The client's retry rules, order, and refusals, against a server that fails on demand."""

import base64
import json
import math
import os
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.data.media.image_processing import PatchFormat, ProcessedImage
from megavlm.data.media.videos import ProcessedVideo
from megavlm.data.processor import Prompt
from megavlm.inference import generation
from megavlm.inference.answers import parse_generate
from megavlm.inference.bodies import continue_body, generate_body, processed_media
from megavlm.inference.client import RolloutClient
from megavlm.inference.errors import RolloutRequestError, RolloutServerError
from megavlm.inference.protocol import ABORT, Response, SamplingParams, VersionSpan
from megavlm.inference.requests import ATTEMPTS, PROMPTS_PER_REQUEST, RequestLimits
from megavlm.inference.server import ClaimedPort
from megavlm.rollout.groups import draft_metrics
from tests.fakes.fixed_servers import FixedServers
from tests.fakes.server import FakeServer, Fault
from tests.support.generation import generate, generate_some
from tests.support.prompts import make_image, make_prompt
from tests.support.responses import make_response, plain

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=4)
ALONE = replace(GREEDY, max_new_tokens=256)  # a request for each prompt
NO_DELAY: dict[str, Any] = {"retry_delay": 0.0}
OPEN = ExitStack()


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    with OPEN:
        yield


def client(*servers: FakeServer | str, **limits: float) -> RolloutClient:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    routing = FixedServers(*urls, api_key="secret")
    return OPEN.enter_context(RolloutClient(routing, RequestLimits(**NO_DELAY | limits)))


def test_order_over_requests_and_samples() -> None:
    """Many requests over two servers: each prompt has its own responses, in order."""
    prompts = [make_prompt(first_id=100 + i) for i in range(4 * PROMPTS_PER_REQUEST + 3)]
    with FakeServer() as a, FakeServer() as b:
        groups = generate(client(a, b), prompts, n=3, sampling_params=GREEDY)
        assert (
            len(a.requests) + len(b.requests) == 5 and abs(len(a.requests) - len(b.requests)) == 1
        )
    assert [[r.token_ids.tolist() for r in group] for group in groups] == [
        [[100 + i, 0], [100 + i, 1], [100 + i, 2]] for i in range(len(prompts))
    ]
    assert groups[0][0].logprobs.tolist() == [-0.5, -1.5]
    assert groups[0][0].finish == "stop" and groups[0][0].weight_version == "1"
    assert groups[0][0].spans == (VersionSpan("1", 0, 2),)


def test_one_prompt_and_none() -> None:
    with FakeServer() as fake:
        asking = client(fake)
        ((response,),) = generate(asking, [make_prompt()], n=1, sampling_params=GREEDY)
        assert response.token_ids.tolist() == [7, 0]
        assert generate(asking, [], n=1, sampling_params=GREEDY) == []


def test_connections_are_kept_between_rollouts() -> None:
    with FakeServer() as fake:
        asking = client(fake)
        for _ in range(3):
            generate(asking, [make_prompt()], n=1, sampling_params=GREEDY)
        assert fake.num_connections == 1


MALFORMED: list[Fault] = ["garbage", "wrong form", "cut", "NaN", "1e999", "long number", "few"]


@pytest.mark.parametrize("fault", ["500", "reset", "hang", "slow body", *MALFORMED])
def test_fault_is_retried(fault: Fault) -> None:
    total = 1.5 if fault in ("hang", "slow body") else 30.0
    with FakeServer(fault, fault) as fake:
        ((response,),) = generate(
            client(fake, total=total), [make_prompt()], n=1, sampling_params=GREEDY
        )
        assert response.token_ids.tolist() == [7, 0]
        assert len(fake.requests) == 3


@pytest.mark.parametrize("fault", ["500", "hang", "garbage"])
def test_retries_are_bounded(fault: Fault) -> None:
    with FakeServer(*[fault] * 20) as fake:
        with pytest.raises(RolloutServerError, match=rf"rows.parquet:7 in {ATTEMPTS} attempts"):
            total = 0.7 if fault == "hang" else 30.0
            generate(client(fake, total=total), [make_prompt()], n=1, sampling_params=GREEDY)
        assert len(fake.requests) == ATTEMPTS


def test_the_limit_grows_with_the_answer_and_names_its_key() -> None:
    expected = (
        r"no whole answer within 0\.3 s \(rollout\.request_timeout=0\.1, and 0\.05 s for each of "
        r"4 tokens\); if requests take too long, raise rollout\.request_timeout, or lower"
    )
    with FakeServer(*["hang"] * 20) as fake:
        with pytest.raises(RolloutServerError, match=expected):
            generate(
                client(fake, total=0.1, token=0.05), [make_prompt()], n=1, sampling_params=GREEDY
            )


def test_refusal_is_not_retried() -> None:
    with FakeServer("400") as fake:
        with pytest.raises(RolloutRequestError, match=r"HTTP 400 .* rows.parquet:7: .*scripted"):
            generate(client(fake), [make_prompt()], n=1, sampling_params=GREEDY)
        assert len(fake.requests) == 1


def test_a_server_that_hangs_after_its_head_is_left_for_the_other() -> None:
    prompts = [make_prompt(first_id=i) for i in range(6)]
    with FakeServer(*["head only"] * 20) as slow, FakeServer() as other:
        asking = client(slow, other, body=1.5)
        groups = generate(asking, prompts, n=2, sampling_params=GREEDY)
        assert slow.requests, "it was asked"
    assert [group[0].token_ids[0] for group in groups] == list(range(6))


def test_dead_server_gives_its_requests_to_the_other() -> None:
    prompts = [make_prompt(first_id=i) for i in range(40)]
    port = ClaimedPort()
    with FakeServer() as alive:
        groups = generate(
            client(f"http://127.0.0.1:{port.number}", alive), prompts, n=2, sampling_params=GREEDY
        )
    assert [group[0].token_ids[0] for group in groups] == list(range(40))


def test_nobody_listens() -> None:
    port = ClaimedPort()
    with pytest.raises(RolloutServerError, match="Cannot connect to host"):
        generate(
            client(f"http://127.0.0.1:{port.number}"), [make_prompt()], n=1, sampling_params=GREEDY
        )


def test_other_prompt_length_stops() -> None:
    with FakeServer(prompt_tokens=4) as fake:
        with pytest.raises(
            RolloutRequestError, match=r"rows.parquet:7: .* counts 4 .* the trainer 3"
        ):
            generate(client(fake), [make_prompt()], n=1, sampling_params=GREEDY)
        assert len(fake.requests) == 1


def test_other_weight_version_stops_where_nobody_watches_the_server() -> None:
    with FakeServer(weight_version="4") as fake:
        asking = client(fake)
        generate(asking, [make_prompt()], n=1, sampling_params=GREEDY, weight_version=4)
        with pytest.raises(RolloutServerError, match=r"\['4'\] instead of 5"):
            generate(asking, [make_prompt()], n=1, sampling_params=GREEDY, weight_version=5)


def test_a_pause_keeps_what_was_aborted() -> None:
    """Aborted responses keep their tokens and weight versions, and are continued by new weights."""
    prompts = [make_prompt(first_id=i) for i in range(5)]
    with FakeServer(weight_version="3") as fake:
        asking = client(fake)
        fake.held = {1, 4}
        first = generate_some(asking, prompts, 3, n=2, sampling_params=ALONE, weight_version=3)
        assert [[r.finish for r in group] for group in first] == [
            ["stop"] * 2,
            ["abort"] * 2,
            ["stop"] * 2,
            ["stop"] * 2,
            ["abort"] * 2,
        ]
        spans = (VersionSpan("3", 0, 2),)
        assert plain(first[1][0]) == ([50, 51], [-0.5, -1.5], "abort", "3", spans)
        assert all(len(body["input_ids"]) == 1 for body in fake.bodies("/generate"))

        fake.held, fake.weight_version = set(), "4"
        begun = [first[1], [], first[4]]
        prompts = [prompts[1], make_prompt(first_id=9), prompts[4]]
        second = generate(
            asking, prompts, n=2, sampling_params=ALONE, weight_version=4, begun=begun
        )
        (continued,) = [b for b in fake.bodies("/generate") if b["input_ids"][0][:1] == [1]][1:]
    assert [[r.token_ids.tolist() for r in group] for group in second] == [
        [[50, 51, 1, 2]] * 2,
        [[9, 0], [9, 1]],
        [[50, 51, 4, 2]] * 2,
    ]
    assert second[0][0].spans == (VersionSpan("3", 0, 2), VersionSpan("4", 2, 4))
    assert second[0][0].logprobs.tolist() == [-0.5, -1.5, -0.5, -1.5]
    assert second[0][0].finish == "stop" and second[0][0].weight_version == "4"
    assert continued["input_ids"] == [[1, 1, 2, 50, 51]] * 2
    assert [p["max_new_tokens"] for p in continued["sampling_params"]] == [254, 254]
    assert [p["n"] for p in continued["sampling_params"]] == [1, 1]


def test_responses_that_another_client_aborts_are_continued() -> None:
    with FakeServer() as fake:
        fake.held = {7}
        fake.aborted.set()
        fake.held_once = True
        ((response,),) = generate(client(fake), [make_prompt()], n=1, sampling_params=GREEDY)
        assert response.token_ids.tolist() == [50, 51, 7, 2] and response.finish == "stop"


@pytest.mark.parametrize(("num_tokens", "finish"), [(0, None), (3, "abort"), (256, "length")])
def test_an_abort_may_come_before_the_first_token_or_with_the_last(
    num_tokens: int, finish: str | None
) -> None:
    prompts = [make_prompt(first_id=i) for i in range(2)]
    with FakeServer() as fake:
        fake.held, fake.num_held_tokens = {1}, num_tokens
        _, group = generate_some(client(fake), prompts, 1, n=2, sampling_params=ALONE)
    assert [response.finish for response in group] == ([finish] * 2 if finish else [])


@pytest.mark.parametrize("ends", [(51,), (2, 51), (51, 2)])
def test_an_aborted_response_that_has_ended_is_complete(ends: tuple[int, ...]) -> None:
    prompts = [make_prompt(first_id=i) for i in range(2)]
    sampling_params = replace(ALONE, stop_ids=ends)
    with FakeServer() as fake:
        fake.held = {1}
        _, group = generate_some(client(fake), prompts, 1, n=1, sampling_params=sampling_params)
    assert [response.finish for response in group] == ["stop"]


def test_a_batch_shows_its_state_once_there_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def show(fake: FakeServer, line: str) -> None:
        lines.append(line)
        fake.aborted.set()

    def ask(answer_after: float | None) -> None:
        """Ask for answers that come after so many seconds, or once a line is shown."""
        lines.clear()
        with FakeServer() as fake:
            fake.held, fake.held_once = {7}, True
            asking = client(fake)
            asking._show = partial(show, fake)
            if answer_after is not None:
                threading.Timer(answer_after, fake.aborted.set).start()
            generate(asking, [make_prompt(), make_prompt(first_id=9)], n=1, sampling_params=GREEDY)

    monkeypatch.setattr(generation, "POLL_EVERY", 0.02)
    ask(answer_after=0.2)
    assert lines[-1].startswith("2 of 2 prompts answered, ")
    assert not [line for line in lines if " 0 tokens/s" in line or "no answer" in line]
    monkeypatch.setattr(generation, "SHOW_WAIT_AFTER", 0.0)
    ask(answer_after=None)
    assert re.fullmatch(r"0 of 2 prompts answered, no answer for \d s", lines[0])


def test_body() -> None:
    sampling_params = SamplingParams(0.7, 9, suppressed_ids=(3, 5), cache_key="4")
    prompts = [make_prompt(images=2), make_prompt(first_id=8)]
    with FakeServer() as fake:
        generate(client(fake), prompts, n=2, sampling_params=sampling_params)
        ((path, body, authorization),) = fake.requests
    assert path == "/generate" and authorization == "Bearer secret"
    url = data_url_of(prompts[0].images[0])
    assert body == {
        "input_ids": [[7, 1, 2], [8, 1, 2]],
        "image_data": [[url] * 2, []],
        "sampling_params": {
            "n": 2,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 9,
            "logit_bias": {"3": -1e9, "5": -1e9},
        },
        "return_logprob": True,
        "extra_key": "4",
    }


@pytest.mark.parametrize("faults", [(), ("500",)])
def test_a_server_on_this_machine_reads_images_from_memory(faults: tuple[Fault, ...]) -> None:
    """Each image is a file as long as its request, also of one that is made again."""
    prompts = [make_prompt(images=2), make_prompt(first_id=8), make_prompt(first_id=9, images=1)]
    with ReadingServer(*faults) as fake:
        routing = FixedServers(fake.url, api_key="secret", is_local=True)
        with RolloutClient(routing, RequestLimits(**NO_DELAY)) as local:
            groups = generate(local, prompts, n=2, sampling_params=GREEDY)
        bodies = fake.bodies("/generate")
    assert [group[0].token_ids[0] for group in groups] == [7, 8, 9]
    files = [b"".join(image.ppm()) for prompt in prompts for image in prompt.images]
    assert fake.files == files * (1 + len(faults))
    assert {len({*chain(*body["image_data"])}) for body in bodies} == {len(files)}
    assert not [
        file for file in Path("/proc/self/fd").iterdir() if "memfd" in os.path.realpath(file)
    ]


class ReadingServer(FakeServer):
    """A server that reads the images' files."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(*faults)
        self.files: list[bytes] = []

    def answer(self, path: str, body: Any) -> Any:
        for file in chain(*body["image_data"]):
            self.files.append(Path(file.removeprefix("file://")).read_bytes())
        return super().answer(path, body)


def data_url_of(image: ProcessedImage) -> str:
    file = base64.b64encode(b"".join(image.ppm())).decode()
    return f"data:image/x-portable-pixmap;base64,{file}"


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ([(math.nan, 5)], "log-probs that are not finite"),
        ([(-0.5, 5), (-math.inf, 6)], "log-probs that are not finite"),
        ([(-0.5, 9)], "a token beyond the 9 of the model"),
        ([(-0.5, -1)], "a token beyond the 9 of the model"),
        ([(-1e39, 5)], "log-probs that are not finite"),
        ([], "a response without a token ended with stop"),
        ([(-0.5, 5)] * 5, "a response of 5 tokens has 5 log-probs, but may have 4"),
    ],
)
def test_an_answer_of_the_right_form_can_be_malformed(
    pairs: list[tuple[float, int]], problem: str
) -> None:
    """The client asks again, as after any ValueError."""
    prompt = make_prompt()
    meta = {
        "output_token_logprobs": pairs,
        "finish_reason": {"type": "stop"},
        "prompt_tokens": len(prompt.token_ids),
        "weight_version": "1",
    }
    with pytest.raises(ValueError, match=problem):
        parse_generate({"meta_info": meta}, [prompt], 1, SamplingParams(1.0, 4, vocab_size=9))


def test_the_example_of_a_response_is_true() -> None:
    begun = make_response((40,), (-0.5,), ABORT, "5", (VersionSpan("5", 0, 1),))
    rest = make_response((151645,), (-0.25,), "stop", "6", (VersionSpan("6", 0, 1),))
    *values, spans = plain(begun.then(rest))
    shown = re.findall(r"^ {8}\w+: +(.+)$", str(Response.__doc__), re.M)
    spans = [[span.version, span.start, span.end] for span in spans]
    assert [json.loads(value) for value in shown] == [*values, spans]


def test_accepted_drafts_are_counted_over_a_response_and_its_continuation() -> None:
    prompt = make_prompt()
    meta = {
        "output_token_logprobs": [(-0.5, 5)] * 4,
        "finish_reason": {"type": "length"},
        "prompt_tokens": len(prompt.token_ids),
        "weight_version": "1",
    }
    counts = {"spec_num_correct_drafts": 1, "spec_verify_ct": 2, "spec_accept_length": 2.0}
    sampling_params = SamplingParams(1.0, 4)
    ((plain,),) = parse_generate({"meta_info": meta}, [prompt], 1, sampling_params)
    ((drafted,),) = parse_generate({"meta_info": meta | counts}, [prompt], 1, sampling_params)
    assert plain.drafts == (0, 0) and draft_metrics([plain]) == {}
    assert drafted.then(plain).then(drafted).drafts == (2, 4)
    assert draft_metrics([drafted, plain]) == {"accept_length": 1.5}


@pytest.mark.parametrize("images", [0, 1, 2])
def test_a_continuation_holds_an_image_once(images: int) -> None:
    """SGLang gives a text to all inputs of a request, and takes lists only for each of them."""
    prompt, begun = make_prompt(images=images), [aborted(5), aborted(6), aborted(7)]
    sampling_params = SamplingParams(temperature=1.0, max_new_tokens=9)
    body = json.loads(b"".join(continue_body(prompt, begun, sampling_params)))
    url = data_url_of(prompt.images[0]) if images else ""
    expected = {0: None, 1: url, 2: [[url, url]] * 3}
    assert body.get("image_data") == expected[images]
    assert [ids[-1] for ids in body["input_ids"]] == [5, 6, 7]


def video_prompt() -> Prompt:
    """Return a prompt of an image of two by two patches and a video of two frames of such."""
    image = make_image("image", 2, 2)
    pixels = torch.arange(2 * 4 * 2 * 3, dtype=torch.uint8).view(2, 4, 2, 3)
    video = ProcessedVideo("video", pixels, image.format, times=(0.5,), seconds_per_grid=2.0)
    prompt = make_prompt(num_tokens=5)
    return replace(prompt, images=(image, video), positions=torch.arange(15).view(3, 5))


def test_a_prompt_with_videos_is_sent_as_it_was_processed() -> None:
    """With all its tokens; and the others of its request as ever."""
    prompts = [video_prompt(), make_prompt(images=1), make_prompt()]
    body = json.loads(b"".join(generate_body(prompts, 2, GREEDY)))
    assert body["input_ids"] == [[0, 1, 2, 3, 4], [7, 1, 2], [7, 1, 2]]
    assert body["image_data"] == [[], [data_url_of(prompts[1].images[0])], []]
    (text,), *others = body["video_data"]
    assert others == [[], []] and text.startswith("megavlm:")
    content = base64.b64decode(text.removeprefix("megavlm:"))
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    image, video = header.pop("media")
    assert (image["medium"], image["shape"]) == ("image", [1, 2, 2])
    assert (video["medium"], video["shape"]) == ("video", [2, 4, 2])
    assert header["num_tokens"] == 5 and header["next_position"] == 5
    assert PatchFormat.from_values(header["format"]) == prompts[0].images[0].format
    positions, rest = content[8 + length :][:60], content[8 + length + 60 :]
    assert struct.unpack("<15i", positions) == tuple(range(15))
    assert rest == bytes(12) + bytes(range(48))

    begun = [aborted(5), aborted(6)]
    again = json.loads(b"".join(continue_body(prompts[0], begun, GREEDY)))
    assert again["video_data"] == text and "image_data" not in again
    assert again["input_ids"] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6]]


def test_a_video_at_another_rate_is_cached_apart() -> None:
    """Its tokens and frames may be the same, but not their positions."""
    prompt = video_prompt()
    image, video = prompt.images
    assert isinstance(video, ProcessedVideo)
    other = replace(prompt, images=(image, replace(video, times=(1.0,))))
    first, second = processed_media(prompt)[1], processed_media(other)[1]
    hashes = [[item["hash"] for item in json.loads(text)["media"]] for text in (first, second)]
    assert hashes[0][0] == hashes[1][0] and hashes[0][1] != hashes[1][1]


def test_videos_are_not_sent_to_a_server_without_our_support() -> None:
    with FakeServer() as fake:
        with pytest.raises(RolloutRequestError, match=r"take the videos of rows\.parquet:7: only"):
            generate(client(fake), [video_prompt()], n=1, sampling_params=GREEDY)
        assert not fake.requests


def aborted(token: int) -> Response:
    return make_response((token,), (-0.5,), "abort", "1")


def test_pauses_before_retries_grow_and_differ() -> None:
    """Up to a second, then two, then four, at random: many clients do not come back together."""
    limits = RequestLimits()
    for attempt, longest in ((1, 1.0), (2, 2.0), (3, 4.0)):
        pauses = [limits.pause(attempt) for _ in range(500)]
        assert all(0 <= pause <= longest for pause in pauses)
        assert max(pauses) > 0.9 * longest and min(pauses) < 0.1 * longest
        assert len(set(pauses)) > 400
