"""Teachers behind a real server: their log-probs are those of transformers, and their tokenizer is
the policy's or refused.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from megavlm.config.data import Data
from megavlm.config.distillation import Distillation, TeacherConfig
from megavlm.data.processor import Processor, Prompt
from megavlm.families import family_of
from megavlm.inference.protocol import Response, SamplingParams, Scored, TeacherLogprobs
from megavlm.inference.teacher import API_KEY, Teacher, check_tokenizers
from megavlm.rollout.teachers import _by_policy
from tests.parity.reference import Reference
from tests.sglang.conftest import Served, model_folder
from tests.sglang.questions import largest_difference, next_turns, prompts

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]
TOP_K = 16


def response(ids: list[int]) -> Response:
    return Response(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop", "start")


def settings_of(*urls: str) -> Distillation:
    teachers = {"large": TeacherConfig(urls=urls)}
    return Distillation(teachers=teachers, divergence="forward_topk", top_k=TOP_K)


def responses() -> list[Response]:
    generator = np.random.default_rng(0)
    return [response(generator.integers(0, 250, n).tolist()) for n in (1, 5, 12)]


def check_logprobs(
    reference: Reference, asked: Mapping[str, Prompt], found: Sequence[Sequence[TeacherLogprobs]]
) -> None:
    """Check that log-probs of `responses()` are those of transformers, and those of the likeliest
    tokens at each position.
    """
    for (name, prompt), scores in zip(asked.items(), found, strict=True):
        scored = [replace(r, logprobs=x.logprobs) for r, x in zip(responses(), scores, strict=True)]
        assert largest_difference(reference, prompt, scored, SamplingParams(1.0, 12)) < 1e-4, name
        for scored_response, (_, top) in zip(scored, scores, strict=True):
            assert top is not None
            ids, theirs = torch.from_numpy(top.ids).long(), torch.from_numpy(top.logprobs)
            with torch.no_grad():
                logits = reference.scores(prompt, scored_response.token_ids.tolist()).logits
            logprobs = logits.log_softmax(-1)
            assert (logprobs.gather(1, ids) - theirs).abs().max() < 1e-4, name
            assert (logprobs.topk(TOP_K).values - theirs).abs().max() < 1e-4, name


@pytest.mark.parametrize("family", ["qwen2_5_vl"])
def test_log_probs_are_those_of_transformers(
    servers: Callable[[str], Served], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With images, in later turns, and several responses to a prompt of different lengths. From
    another family, whose images have another number of tokens, prompts have the teacher's.
    """
    served = servers(family).restore()
    monkeypatch.setenv(API_KEY, served.server.api_key)
    own = prompts(served.processor) | next_turns(served.processor)
    folder = model_folder("qwen3_vl")
    policy = Processor(folder, Data(max_prompt_tokens=4096), family_of(folder))
    others = prompts(policy)
    read = {}  # others, as the teacher reads them
    for name, prompt in others.items():
        row = replace(prompt.row, images=tuple(image.png() for image in prompt.images))
        read[f"{name}, from another family"] = served.processor.prompt(row)
        assert read[f"{name}, from another family"].short_ids == prompt.short_ids

    async def ask() -> list[list[TeacherLogprobs]]:
        teacher = Teacher(settings_of(served.server.url), "large")
        calls = (teacher.logprobs(x, responses()) for x in (*own.values(), *others.values()))
        found = await asyncio.gather(*calls)
        await teacher.close()
        return found

    lengths = [[len(p.token_ids) for p in prompts.values()] for prompts in (others, read)]
    assert sum(a != b for a, b in zip(*lengths, strict=True)) == 2, lengths
    check_logprobs(Reference(served.folder), own | read, asyncio.run(ask()))


def test_a_hinted_policy_s_log_probs_are_those_of_transformers(served: Served) -> None:
    """By the run's own client, all responses to a prompt at once."""
    hinted = {
        name: served.processor.hinted(prompt, "\n\nThe answer is 3.")
        for name, prompt in prompts(served.restore().processor).items()
    }
    how = SamplingParams(1.0, 12, cache_key="key", suppressed_ids=(1, 2))
    with served.client as client:
        generate = partial(client.generate, sampling_params=how, accepts=lambda version: True)
        found = [
            client.run(_by_policy(generate, prompt, Scored(responses(), TOP_K)))
            for prompt in hinted.values()
        ]
    check_logprobs(Reference(served.folder), hinted, found)


def test_a_teacher_has_the_policys_tokenizer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, served.server.api_key)
    settings, texts = settings_of(served.server.url), served.processor.token_texts()
    check_tokenizers(settings, texts)
    check_tokenizers(settings, texts[:-1])  # it may have more tokens
    texts[70], texts[71] = texts[71], texts[70]
    with pytest.raises(ValueError, match=r"has another tokenizer than model.folder, token 70 is "):
        check_tokenizers(settings, texts)
    with pytest.raises(
        ValueError, match=r"distillation.teachers.large.urls: http://localhost:9 does not tell"
    ):
        check_tokenizers(settings_of("http://localhost:9"), texts)
