"""The server's samples and log-probs against transformers in fp32 on the same weights."""

from collections.abc import Callable

import pytest
import torch

from megavlm.data.processor import Prompt
from megavlm.inference.protocol import SamplingParams
from tests.parity.reference import Reference
from tests.sglang.conftest import Served
from tests.sglang.questions import largest_difference, next_turns, prompts
from tests.support.generation import generate
from tests.support.levels import slow

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]


@pytest.fixture(scope="module")
def reference(started: Served) -> Reference:
    return Reference(started.folder)


def make_sampling_params(
    served: Served, temperature: float = 1.0, max_new_tokens: int = 16
) -> SamplingParams:
    return SamplingParams(
        temperature, max_new_tokens, suppressed_ids=tuple(served.processor.suppressed_ids)
    )


@pytest.mark.parametrize(
    ("family", "temperature"),
    [
        ("qwen2_5_vl", 1.0),
        ("qwen2_5_vl", 0.7),
        *slow(
            ("qwen2_vl", 0.7),
            ("qwen3_vl", 0.7),
            ("qwen3_vl_moe", 0.7),
            ("qwen3_5", 0.7),
            ("qwen3_5_moe", 0.7),
            ("glm4v", 0.7),
            ("glm4v_moe", 0.7),
            ("internvl", 0.7),
            ("internvl_moe", 0.7),
            ("minicpmv4_6", 0.7),
            ("qwen3_omni_moe", 0.7),
        ),
    ],
)
def test_logprobs(servers: Callable[[str], Served], family: str, temperature: float) -> None:
    """In one batch, so that an order mixed up between prompts shows; lengths are checked inside."""
    served = servers(family).restore()
    reference = Reference(served.folder)
    by_name = prompts(served.processor) | next_turns(served.processor)
    drawn = make_sampling_params(served, temperature)
    groups = generate(
        served.client, list(by_name.values()), n=3, sampling_params=drawn, weight_version=None
    )
    for (name, prompt), responses in zip(by_name.items(), groups, strict=True):
        assert len(responses) == 3 and {r.weight_version for r in responses} == {"start"}
        assert largest_difference(reference, prompt, responses, drawn) < 1e-4, name
    # The responses differ: this is sampling.
    assert len({tuple(r.token_ids.tolist()) for group in groups for r in group}) > 6


def test_wrong_temperature_would_show(served: Served, reference: Reference) -> None:
    prompt = prompts(served.processor)["one image"]
    (responses,) = generate(
        served.client, [prompt], n=4, sampling_params=make_sampling_params(served, 0.7)
    )
    assert (
        largest_difference(reference, prompt, responses, make_sampling_params(served, 1.0)) > 1e-2
    )


def test_temperature_zero_is_greedy(served: Served, reference: Reference) -> None:
    by_name = prompts(served.processor)
    greedy = make_sampling_params(served, 0.0, max_new_tokens=6)
    groups = generate(served.client, list(by_name.values()), n=1, sampling_params=greedy)
    for prompt, (response,) in zip(by_name.values(), groups, strict=True):
        with torch.no_grad():
            logits = reference.scores(prompt, response.token_ids.tolist()).logits
        logits[:, list(greedy.suppressed_ids)] = -torch.inf
        assert logits.argmax(-1).tolist() == response.token_ids.tolist()
        assert largest_difference(reference, prompt, [response], greedy) < 1e-4


def test_suppressed_ids_are_never_sampled(served: Served) -> None:
    """All ids but three are suppressed, at a high temperature; none may slip through."""
    vocab_size, eos = served.processor.vocab_size, served.processor.eos_id
    allowed = {5, 9, eos}
    suppressed = tuple(token for token in range(vocab_size) if token not in allowed)
    hot = SamplingParams(temperature=5.0, max_new_tokens=8, suppressed_ids=suppressed)
    by_name: list[Prompt] = list(prompts(served.processor).values())
    groups = generate(served.client, by_name, n=8, sampling_params=hot)
    sampled = {token for group in groups for r in group for token in r.token_ids}
    assert sampled == allowed


def test_finish(served: Served) -> None:
    """`stop` ends with the end-of-turn token, which is counted; `length` has all tokens."""
    eos, other = served.processor.eos_id, 5
    prompt = prompts(served.processor)["text"]
    for token, finish, length in ((eos, "stop", 1), (other, "length", 4)):
        only = tuple(i for i in range(served.processor.vocab_size) if i != token)
        ((response,),) = generate(
            served.client,
            [prompt],
            n=1,
            sampling_params=SamplingParams(1.0, 4, suppressed_ids=only),
        )
        assert response.finish == finish and response.token_ids.tolist() == [token] * length
        assert response.logprobs.tolist() == [0.0] * length
