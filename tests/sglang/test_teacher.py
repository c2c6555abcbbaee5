"""A teacher behind a real server: its log-probs are those of transformers, and its tokenizer is the
policy's or refused.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from megavlm.config.distillation import Distillation
from megavlm.inference.protocol import Response, SamplingParams, TeacherLogprobs
from megavlm.inference.teacher import API_KEY, Teacher, check_tokenizers
from megavlm.subprocess_pool.failure import CallFailure
from tests.parity.reference import Reference
from tests.sglang.conftest import Served
from tests.sglang.questions import largest_difference, next_turns, prompts

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]


def response(ids: list[int]) -> Response:
    return Response(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop", "start")


@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl"],
)
def test_log_probs_are_those_of_transformers(
    servers: Callable[[str], Served], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the tokens and of the likeliest at each position: with images, in later turns, and several
    responses to a prompt of different lengths.
    """
    served = servers(family).restore()
    monkeypatch.setenv(API_KEY, served.server.api_key)
    reference = Reference(served.folder)
    by_name = prompts(served.processor) | next_turns(served.processor)
    generator = np.random.default_rng(0)
    responses = [response(generator.integers(0, 250, n).tolist()) for n in (1, 5, 12)]

    settings = Distillation(urls=(served.server.url,), divergence="forward_topk", top_k=16)

    async def ask() -> list[list[TeacherLogprobs]]:
        teacher = Teacher(settings)
        calls = (teacher.logprobs(prompt, responses) for prompt in by_name.values())
        found = await asyncio.gather(*calls)
        await teacher.close()
        return found

    for (name, prompt), found in zip(by_name.items(), asyncio.run(ask()), strict=True):
        scored = [replace(r, logprobs=x.logprobs) for r, x in zip(responses, found, strict=True)]
        assert largest_difference(reference, prompt, scored, SamplingParams(1.0, 12)) < 1e-4, name
        for scored_response, (_, top) in zip(responses, found, strict=True):
            assert top is not None
            ids, theirs = torch.from_numpy(top.ids).long(), torch.from_numpy(top.logprobs)
            with torch.no_grad():
                scores = reference.scores(prompt, scored_response.token_ids.tolist())
            logprobs = scores.logits.log_softmax(-1)
            assert (logprobs.gather(1, ids) - theirs).abs().max() < 1e-4, name
            assert (logprobs.topk(16).values - theirs).abs().max() < 1e-4, name


def test_a_teacher_has_the_policys_tokenizer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, served.server.api_key)
    settings, texts = Distillation(urls=(served.server.url,)), served.processor.token_texts()
    check_tokenizers(settings, texts)
    texts[70], texts[71] = texts[71], texts[70]
    with pytest.raises(ValueError, match=r"has another tokenizer than model.folder, token 70 is "):
        check_tokenizers(settings, texts)
    with pytest.raises(ValueError, match=r"distillation.urls: http://localhost:9 does not tell"):
        check_tokenizers(Distillation(urls=("http://localhost:9",)), texts)


def test_an_image_of_other_tokens_is_a_failure(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, served.server.api_key)
    prompt = prompts(served.processor)["one image"]
    longer = replace(prompt, token_ids=torch.cat([prompt.token_ids, prompt.token_ids[-1:]]))
    teacher = Teacher(Distillation(urls=(served.server.url,)))
    with pytest.raises(CallFailure, match=r"the server counts \d+ tokens of prompt and response"):
        asyncio.run(teacher.logprobs(longer, [response([5, 6])]))
