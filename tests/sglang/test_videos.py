"""Prompts with videos and audio at the real server: its log-probs against transformers' on the same
weights, with the trainer's frames and positions.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megavlm.data.media.video_sources import AnyVideo, VideoFile
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.inference.client import RolloutClient
from megavlm.inference.errors import RolloutRequestError
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.requests import RequestLimits
from tests.fakes.fixed_servers import FixedServers
from tests.parity.inputs import QUESTION, image, video
from tests.parity.reference import Reference
from tests.sglang.conftest import Served
from tests.sglang.questions import SPELLED, audio_prompts, largest_difference, prompts
from tests.sglang.test_rollouts import cut
from tests.support.generation import generate
from tests.support.timeouts import scaled
from tests.support.video_files import grey_video

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]

FAMILIES = [
    "qwen2_5_vl",
    pytest.param("qwen2_vl", marks=pytest.mark.slow),
    pytest.param("qwen3_5", marks=pytest.mark.slow),
    pytest.param("qwen3_vl", marks=pytest.mark.slow),
    pytest.param("glm4v", marks=pytest.mark.slow),
    pytest.param("glm4v_moe", marks=pytest.mark.slow),
    pytest.param("internvl", marks=pytest.mark.slow),
    pytest.param("minicpmv4_6", marks=pytest.mark.slow),
    pytest.param("qwen3_omni_moe", marks=pytest.mark.slow),
]


def shown(processor: Processor, problem: str, *videos: AnyVideo, images: int = 0) -> Prompt:
    pictures = tuple(image(84 + 28 * i, 56, seed=i) for i in range(images))
    return processor.prompt(Row(1, problem, "", pictures, "", "test:1", videos))


def video_prompts(processor: Processor) -> dict[str, Prompt]:
    """Text follows every video. At a low rate its positions go on from a time."""
    slow, fast = video(84, 56, 6, 1, fps=0.2), video(56, 112, 3, 2, fps=7.0)
    spelled = processor._tokenizer(SPELLED, add_special_tokens=False, split_special_tokens=True)
    first = shown(processor, f"<video>{QUESTION}", slow)
    row = Row(1, f"Now <video> and {QUESTION}", "", (), "", "test:1", (fast,))
    said = [*spelled["input_ids"], processor.eos_id]
    second = processor.next_turn(first, said, row)
    third = replace(row, problem="And this one?", videos=(), images=(image(56, 56, seed=8),))
    return {
        "a video": first,
        "a file": shown(processor, f"<video>{QUESTION}", VideoFile(grey_video(12, fps=3))),
        "two videos": shown(processor, f"First <video>, then <video>{QUESTION}", slow, fast),
        "videos and images": shown(
            processor, f"<image>a<video>b<image>c<video>{QUESTION}", fast, slow, images=2
        ),
        "a later turn": second,
        "an image in a later turn": processor.next_turn(second, said, third),
    }


def make_sampling_params(served: Served, max_new_tokens: int = 8) -> SamplingParams:
    return SamplingParams(
        1.0, max_new_tokens, suppressed_ids=tuple(served.processor.suppressed_ids)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs(servers: Callable[[str], Served], family: str) -> None:
    """In one batch with prompts without videos and audio. The same video at another rate comes in a
    further request: its tokens may be the same, and must not be taken from the prefix cache.
    """
    served = servers(family).restore()
    reference, drawn = Reference(served.folder), make_sampling_params(served)
    by_name = video_prompts(served.processor) | audio_prompts(served.processor)
    by_name |= prompts(served.processor)
    groups = generate(served.client, list(by_name.values()), n=3, sampling_params=drawn)
    for (name, prompt), responses in zip(by_name.items(), groups, strict=True):
        assert len(responses) == 3
        assert largest_difference(reference, prompt, responses, drawn) < 1e-4, name
    for fps in (1.0, 0.05):
        prompt = shown(served.processor, f"<video>{QUESTION}", video(84, 56, 6, 1, fps=fps))
        (responses,) = generate(served.client, [prompt], n=2, sampling_params=drawn)
        assert largest_difference(reference, prompt, responses, drawn) < 1e-4, fps
    if family == "qwen2_5_vl":  # its positions follow the rate, and its tokens do not
        assert largest_difference(reference, by_name["a video"], responses, drawn) > 1e-3


def test_content_in_the_request_and_continued_responses(served: Served) -> None:
    """A server on another machine gets the frames in the request."""
    server = served.server
    how = replace(make_sampling_params(served, 24), temperature=0.0)
    asked = list(video_prompts(served.processor).values())
    whole = generate(served.client, asked, n=2, sampling_params=how)
    routing = FixedServers(
        server.url, api_key=server.api_key, admin_key=server.admin_key, takes_videos=True
    )
    begun = [[cut(response, 5 + i) for i, response in enumerate(group)] for group in whole]
    with RolloutClient(routing, RequestLimits(total=scaled(120))) as remote:
        for answers in (
            generate(remote, asked, n=2, sampling_params=how),
            generate(remote, asked, n=2, sampling_params=how, begun=begun),
            generate(served.client, asked, n=2, sampling_params=how, begun=begun),
        ):
            for group, expected in zip(answers, whole, strict=True):
                for response, other in zip(group, expected, strict=True):
                    assert response.token_ids.tolist() == other.token_ids.tolist()
                    assert response.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_wrong_positions_would_show(served: Served) -> None:
    """The server computes with the positions that it is sent, of a video not yet in its cache."""
    prompt = shown(served.processor, f"<video>{QUESTION}", video(84, 56, 6, 77))
    moved = replace(prompt, positions=prompt.positions * torch.tensor([[9], [1], [1]]))
    drawn = make_sampling_params(served)
    (responses,) = generate(served.client, [moved], n=2, sampling_params=drawn)
    assert largest_difference(Reference(served.folder), prompt, responses, drawn) > 1e-3


def test_tokens_of_other_media_are_refused(served: Served) -> None:
    prompt = video_prompts(served.processor)["a video"]
    kept = (prompt.token_ids != served.processor.video_token_id).long().cumsum(0) != 5
    fewer = replace(prompt, token_ids=prompt.token_ids[kept], positions=prompt.positions[:, kept])
    tokens = fewer.token_ids.clone()
    tokens[tokens == served.processor.video_token_id] = 7
    with pytest.raises(RolloutRequestError, match="has 0 of the"):
        wrong = replace(fewer, token_ids=tokens)
        generate(served.client, [wrong], n=1, sampling_params=make_sampling_params(served))


def test_a_server_without_our_support_is_not_sent_videos(served: Served) -> None:
    server, prompt = served.server, video_prompts(served.processor)["a video"]
    routing = FixedServers(server.url, api_key=server.api_key)
    with RolloutClient(routing) as client:
        with pytest.raises(
            RolloutRequestError, match=r"does not take the videos of test:1: only s"
        ):
            generate(client, [prompt], n=1, sampling_params=make_sampling_params(served))
        generate(
            client,
            list(prompts(served.processor).values()),
            n=1,
            sampling_params=make_sampling_params(served),
        )
