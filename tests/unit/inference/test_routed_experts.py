"""Routed experts in requests and answers."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megavlm.inference.answers import parse_continue, parse_generate
from megavlm.inference.bodies import continue_body, generate_body
from megavlm.inference.errors import RolloutRequestError
from megavlm.inference.protocol import Response, SamplingParams
from megavlm.inference.routed_experts import RoutedExpertsShape, routed_experts_shape
from megavlm.inference.server_support.megavlm_routed_experts import narrow
from tests.support.prompts import make_prompt
from tests.support.responses import make_response

SHAPE = RoutedExpertsShape(num_layers=2, num_experts=64, top_k=3)
HOW = SamplingParams(1.0, 9, routed_experts=SHAPE)
PROMPT = make_prompt(num_tokens=5)


def rows(first: int, end: int) -> Any:
    """Return routed experts [end - first, 2, 3] that tell tokens apart."""
    return np.arange(first * 6, end * 6, dtype=np.int32).reshape(-1, 2, 3) % 64


def answer(tokens: list[int], first: int, num_before: int = 0, **changed: Any) -> dict[str, Any]:
    """Return an answer of `tokens` after the prompt and `num_before` tokens, with the routed
    experts from token `first` on.
    """
    end = len(PROMPT.token_ids) + num_before + len(tokens) - 1
    meta = {
        "output_token_logprobs": [(-0.5, token) for token in tokens],
        "finish_reason": {"type": "stop"},
        "prompt_tokens": len(PROMPT.token_ids) + num_before,
        "weight_version": "1",
        "routed_experts": base64.b64encode(rows(first, end).tobytes()).decode(),
    }
    return {"meta_info": meta | changed}


@pytest.mark.parametrize("num_experts", [128, 256, 512])
def test_narrow_routes_are_read_as_sglang_s_own(num_experts: int) -> None:
    shape = RoutedExpertsShape(2, num_experts, 3)
    routed_experts = np.random.default_rng(0).integers(0, num_experts, (500, 2, 3)).astype(np.int32)
    own = base64.b64encode(routed_experts.tobytes()).decode()
    narrower = narrow(torch.from_numpy(routed_experts)).numpy().tobytes()
    assert len(narrower) == 1 + routed_experts.size * np.dtype(shape.dtype).itemsize
    for text in (own, base64.b64encode(narrower).decode()):
        assert np.array_equal(shape.decode(text), routed_experts)
    assert len(shape.decode(base64.b64encode(narrow(torch.zeros(0, 2, 3)).numpy()).decode())) == 0


def assert_routes(response: Response, first: int) -> None:
    assert response.routed_experts is not None and response.routed_experts.dtype == np.uint8
    end = len(PROMPT.token_ids) + len(response.token_ids) - 1
    assert np.array_equal(response.routed_experts, rows(first, end))


def test_a_prompt_s_routes_are_kept_once() -> None:
    body = json.loads(b"".join(generate_body([PROMPT], 2, HOW)))
    assert body["return_routed_experts"] is True and body["routed_experts_start_len"] == 0
    answers = [answer([7, 8], 0), answer([9], 0)]
    ((first, second),) = parse_generate(answers, [PROMPT], 2, HOW)
    assert_routes(first, 0)
    assert_routes(second, 4)


def test_a_later_turn_gets_what_the_turn_before_lacks() -> None:
    body = json.loads(b"".join(generate_body([PROMPT], 1, HOW, first_routed=3)))
    assert body["routed_experts_start_len"] == 3
    ((response,),) = parse_generate(answer([7, 8], 3), [PROMPT], 1, HOW, 3)
    assert_routes(response, 3)


def test_a_continuation_gets_what_its_begin_lacks() -> None:
    aborted = {"finish_reason": {"type": "abort"}}
    answers = [answer([7, 8, 9], 0, **aborted), answer([7], 0, **aborted)]
    (begun,) = parse_generate(answers, [PROMPT], 2, HOW)
    body = json.loads(b"".join(continue_body(PROMPT, begun, HOW)))
    assert body["routed_experts_start_len"] == 5, "the second one has 4 and the token after"
    rest = [answer([4, 5], 5, 3), answer([6], 5, 1)]
    first, second = parse_continue(rest, PROMPT, begun, HOW)
    assert_routes(first, 0)
    assert_routes(second, 4)


def test_what_a_server_had_dropped_before_an_abort_is_asked_for_again() -> None:
    """A retracted request has no cache."""
    aborted = {"finish_reason": {"type": "abort"}, "routed_experts": None}
    ((begun,),) = parse_generate(answer([7, 8], 0, **aborted), [PROMPT], 1, HOW)
    assert begun.routed_experts is None and begun.first_unrouted(5) == 0
    (response,) = parse_continue(answer([9], 0, 2), PROMPT, [begun], HOW)
    assert_routes(response, 0)
    # aborted before its first token, or again without routed experts
    queued = answer([], 0, 2, **aborted)
    (waiting,) = parse_continue(queued, PROMPT, [response], HOW)
    assert_routes(waiting, 0)
    (lost,) = parse_continue(answer([6], 0, 3, **aborted), PROMPT, [response], HOW)
    assert lost.routed_experts is None and lost.first_unrouted(5) == 0


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"routed_experts": base64.b64encode(rows(0, 5).tobytes()).decode()}, "6 tokens have"),
        ({"routed_experts": base64.b64encode(rows(0, 6)[..., :2].tobytes()).decode()}, "6 tokens"),
        ({"routed_experts": base64.b64encode(rows(0, 6) + 30).decode()}, "beyond the 64"),
        ({"routed_experts": base64.b64encode(rows(0, 6) - 1).decode()}, "beyond the 64"),
        ({"routed_experts": "AAA"}, "padding"),
        ({"routed_experts": base64.b64encode(b"12345678").decode()}, "reshape"),
    ],
)
def test_other_routes_are_malformed(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_generate(answer([7, 8], 0, **changed), [PROMPT], 1, HOW)


def test_a_server_that_returns_none_is_refused() -> None:
    without = answer([7], 0, routed_experts=None)
    with pytest.raises(RolloutRequestError, match="start it with --enable-return-routed-experts"):
        parse_generate(without, [PROMPT], 1, HOW)
    ((response,),) = parse_generate(without, [PROMPT], 1, SamplingParams(1.0, 9))
    assert response.routed_experts is None
    assert "return_routed_experts" not in json.loads(
        b"".join(generate_body([PROMPT], 1, SamplingParams(1.0, 9)))
    )


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(128, np.uint8), (256, np.uint8), (512, np.int16)]
)
def test_an_expert_takes_as_few_bytes_as_its_number(num_experts: int, dtype: Any) -> None:
    assert RoutedExpertsShape(48, num_experts, 8).dtype == dtype


def test_a_model_has_routes_if_it_has_experts(tmp_path: Path) -> None:
    text = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 384,
    }
    experts = {"num_experts": 8, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
    part = {"text_config": text | experts}
    for values in (
        {"model_type": "qwen3_vl_moe", **part},
        {"model_type": "qwen3_omni_moe", "thinker_config": part},
    ):
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert routed_experts_shape(tmp_path) == RoutedExpertsShape(4, 8, 2)
    values = {"model_type": "qwen3_vl", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert routed_experts_shape(tmp_path) is None


def test_a_joined_response_needs_routes_of_all_its_parts() -> None:
    begun = make_response((7,), (-1.0,), "abort")
    assert begun.then(make_response((8,), (-1.0,))).routed_experts is None
